"""Whom a ledger knows: the consumers that have records in it, or messages that wait."""

from collections.abc import Collection, Iterable, Sequence

from oncely.core.errors import ConfigError
from oncely.core.record import State
from oncely.core.waiting import consumer_of
from oncely.ledger import Ledger

_TOLD = 5
"""Names of consumers in a line."""


def consumers(ledger: Ledger) -> Sequence[str]:
    """Who has records in the ledger."""
    return names_in(ledger.tallies())


def names_in(tallies: Iterable[tuple[str, State]]) -> Sequence[str]:
    """Whose tallies these are."""
    return sorted({consumer for consumer, _ in tallies})


def check_known(ledger: Ledger, consumer: str) -> None:
    """Raise ConfigError where the ledger has no record of a consumer: its name may be a slip."""
    known = consumers(ledger)
    if consumer not in known:
        raise ConfigError(f"no records of consumer {consumer!r}: {told(known)}")


def check_known_at_all(ledger: Ledger, consumer: str, what: str) -> None:
    """As `check_known`, also by what waits and by policies; `what` is what was looked for."""
    waiting = {consumer_of(queue) for queue in ledger.mailbox.backlogs()} - {None}
    known = {*consumers(ledger), *ledger.retentions(), *waiting}
    if consumer not in known:
        names = _listed(sorted(name for name in known if name)) or "nobody"
        raise ConfigError(f"no {what} or records of consumer {consumer!r}; known: {names}")


def told(known: Sequence[str]) -> str:
    """Whose records there are, in words."""
    return f"the ledger has records of {_listed(known) or 'nobody'}"


def _listed(names: Collection[str]) -> str:
    first = ", ".join([*names][:_TOLD])
    return f"{first}, ..." if len(names) > _TOLD else first
