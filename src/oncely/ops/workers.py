"""The processes that work with a ledger."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from oncely.core.activity import LATE_S, Worker
from oncely.core.record import Record
from oncely.core.shown import utc
from oncely.ledger.ledger import Ledger

ALIVE, GONE, STOPPED = "alive", "gone", "stopped"


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
        heard = ALIVE if now - each.seen <= LATE_S else GONE
        found.append(SeenWorker(each, heard if each.ended is None else STOPPED))
    held = ledger.operations.claims_of(_numbers(found))
    return [
        each
        if each.is_alive
        else each._replace(worker=each.worker._replace(claims=held.get(each.worker.number or 0, 0)))
        for each in found
    ]


def left_by(
    ledger: Ledger, found: Sequence[SeenWorker], *, alive: bool = False
) -> Sequence[Record]:
    """The records of claims whose leases go on, and whose processes do not; or of all of these."""
    return ledger.operations.claimed_by(_numbers(found, alive=alive))


def _numbers(found: Sequence[SeenWorker], *, alive: bool = False) -> Collection[int]:
    """The numbers that claims of processes have which do not go on; or of all of these."""
    # A process has as many workers as it has opened ledgers, one after another or at once.
    living = {each.worker.number for each in found if each.is_alive and not alive}
    numbers = {each.worker.number for each in found} - living
    return [each for each in numbers if each is not None]
