"""The processes that work with a ledger, and the claims of those that are gone."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from oncely.core.activity import Worker
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Key, Record
from oncely.core.rules import Standing, standing
from oncely.core.shown import span, utc
from oncely.ledger.ledger import Ledger
from oncely.ledger.recorder import BEAT_S
from oncely.ops.auditing import Changed, Noted
from oncely.ops.decisions import change_keys
from oncely.ops.known import check_kept

ALIVE, GONE, STOPPED = "alive", "gone", "stopped"
_LATE_S = 3 * BEAT_S


class SeenWorker(NamedTuple):
    """A worker, with the claims that it holds; and whether it lives."""

    worker: Worker
    state: str
    """ALIVE, STOPPED by itself, or GONE: silent for half a minute, so killed or cut off."""

    @property
    def is_alive(self) -> bool:
        """Whether it was heard lately."""
        return self.state == ALIVE

    @property
    def in_words(self) -> str:
        """The state for people: since when, and what it has left."""
        if self.is_alive:
            return ALIVE
        ended, claims = self.worker.ended, self.worker.claims
        when = (
            f"gone since {utc(self.worker.seen)}" if ended is None else f"stopped at {utc(ended)}"
        )
        return f"{when}, held {claims:,} claim{'s' if claims > 1 else ''}" if claims else when

    def as_dict(self) -> dict[str, Any]:
        """The worker as JSON has it."""
        told = {"state": self.state, "in_words": self.in_words, "is_alive": self.is_alive}
        return {**self.worker._asdict(), "name": self.worker.name, **told}


def workers(ledger: Ledger) -> Sequence[SeenWorker]:
    """The processes that work with the ledger; those that stopped within a day; and those that were
    killed, until they are purged.
    """
    now, found = ledger.now(), []
    for each in ledger.operations.workers():
        heard = ALIVE if now - each.seen <= _LATE_S else GONE
        found.append(SeenWorker(each, heard if each.ended is None else STOPPED))
    held = Counter(record.worker for record in _left(ledger, found))
    return [
        each
        if each.is_alive
        else each._replace(worker=each.worker._replace(claims=held[each.worker.number]))
        for each in found
    ]


def _left(ledger: Ledger, found: Sequence[SeenWorker], *, alive: bool = False) -> Sequence[Record]:
    """The records of claims whose leases go on, and whose processes do not; or of all of these."""
    # A process has as many workers as it has opened ledgers, one after another or at once.
    living = {each.worker.number for each in found if each.is_alive and not alive}
    numbers = {each.worker.number for each in found} - living
    claimed = ledger.operations.claimed_by([each for each in numbers if each is not None])
    now = ledger.now()
    return [record for record in claimed if standing(record, now) is Standing.HELD]


def worker_dead(
    ledger: Ledger, name: str, *, is_sure: bool = False, **noted: Unpack[Noted]
) -> Changed[Key]:
    """End the claims of the worker HOST:PID, as somebody knows that it is dead: each message is in
    doubt at once, and what that worker still writes is refused. Noted as by `reset`.

    Raises RefusedError for one that is alive, unless somebody `is_sure`, and ConfigError where the
    ledger knows none of that name.
    """
    check_kept(ledger)
    # Of one name there may be several, of which one lives: all have pid 1 in their containers.
    named = [each for each in workers(ledger) if each.worker.name == name]
    if not named:
        raise ConfigError(f"{name!r} is not a worker of this ledger; see: oncely workers")
    if live := all(each.is_alive for each in named):
        _check_sure(ledger, named[0], is_sure=is_sure)
    return _end(ledger, _left(ledger, named, alive=live), noted, name)


def end_claim(
    ledger: Ledger, record: Record, *, is_sure: bool = False, **noted: Unpack[Noted]
) -> Changed[Key]:
    """The same for the claim on one record."""
    name = "its worker"
    for each in workers(ledger):
        if each.worker.number == record.worker is not None:
            name = each.worker.name
            if each.is_alive:
                _check_sure(ledger, each, is_sure=is_sure)
    return _end(ledger, [record], noted, name)


def _check_sure(ledger: Ledger, seen: SeenWorker, *, is_sure: bool) -> None:
    if not is_sure:
        at = seen.worker.seen
        raise RefusedError(
            f"{seen.worker.name} is alive: seen {span(ledger.now() - at)} ago; it is gone if it is "
            f"not seen again until {utc(at + _LATE_S)}. If you know that it is dead, add --yes"
        )


def _end(ledger: Ledger, found: Sequence[Record], noted: Noted, name: str) -> Changed[Key]:
    records = {record.key: record for record in found}
    why = noted.get("why")
    noted = Noted(**{**noted, "why": f"{name} is dead{f'; {why}' if why else ''}"})

    def end(key: Key, note: Mapping[str, Any]) -> None:
        ledger.end_claim(records[key], **note)

    return change_keys(ledger, [*records], "worker_dead", end, **noted)
