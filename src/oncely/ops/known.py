"""The consumers that a ledger knows: they have records in it, or messages that wait; and as many of
its rows as were asked for.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from oncely.core.errors import ConfigError
from oncely.core.record import State
from oncely.core.waiting import consumer_of
from oncely.ledger.ledger import Ledger
from oncely.stores.store import Tally

Row = TypeVar("Row")

_NOWHERE = (
    "the ledger is in a store without transactions, where no messages wait: the broker has the "
    "dead letters, in the queue NAME.dead beside each queue NAME"
)
EXACT = 100_000
"""Up to so many records are counted one by one."""
_TOLD = 5
"""The most names of consumers in one line."""


def consumers(ledger: Ledger) -> Sequence[str]:
    """The consumers that have records in the ledger, for which all of them are read."""
    return names_in(ledger.tallies())


def names_in(tallies: Iterable[tuple[str, State]]) -> Sequence[str]:
    """The consumers of these tallies."""
    return sorted({consumer for consumer, _ in tallies})


def check_known(ledger: Ledger, consumer: str) -> None:
    """Raise ConfigError where the ledger has no record of a consumer: its name may be a typo. Of
    more than EXACT records only some are read, and then nothing is raised.
    """
    tallies = ledger.tallies(EXACT)
    if consumer not in names_in(tallies) and not _is_sample(tallies):
        names = _listed(names_in(tallies))
        known = f"the ledger has records of {names}" if names else "the ledger has no records"
        raise ConfigError(f"no records of consumer {consumer!r}: {known}")


def check_known_at_all(ledger: Ledger, consumer: str, what: str) -> None:
    """As `check_known`, but waiting messages and a stored retention count, too; `what` names what
    was looked for.
    """
    tallies = ledger.tallies(EXACT)
    waiting = {consumer_of(queue) for queue in ledger.mailbox.backlogs()} - {None}
    known = {*names_in(tallies), *ledger.retentions(), *waiting}
    if consumer not in known and not _is_sample(tallies):
        names = _listed(sorted(name for name in known if name)) or "none"
        raise ConfigError(f"no {what} or records of consumer {consumer!r}; known: {names}")


def _is_sample(tallies: Mapping[tuple[str, State], Tally]) -> bool:
    """Whether these may lack a consumer."""
    return any(tally.is_estimate for tally in tallies.values())


def _listed(names: Collection[str]) -> str:
    first = ", ".join([*names][:_TOLD])
    return f"{first}, ..." if len(names) > _TOLD else first


def check_waits(ledger: Ledger) -> None:
    """Raise ConfigError where the store cannot keep messages that wait."""
    if not ledger.can_defer:
        raise ConfigError(_NOWHERE)


def first(rows: Iterable[Row], limit: int) -> tuple[Sequence[Row], bool]:
    """At most `limit` of the rows, and whether there are more."""
    found = [*islice(rows, limit + 1)]
    return found[:limit], len(found) > limit


def check_kept(ledger: Ledger) -> None:
    """Raise ConfigError where the store keeps nothing for operators."""
    if not ledger.operations.keeps_operations:
        raise ConfigError(
            "this store keeps no workers, activity, runs or audit; use a ledger in SQL, such as "
            "sqlite:///oncely.db"
        )
