"""Messages in doubt, with what helps to decide about each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oncely.core.record import Record
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.ledger import Ledger
from oncely.ops.records import record_as_dict


@dataclass(frozen=True, slots=True)
class Doubt:
    """A record in doubt, and what its handler had come to."""

    record: Record
    steps: Sequence[str]
    """The names of its finished steps, which are not run again."""
    unsent: int
    """Deferred messages that wait to be sent: usually none, as what a handler sends is stored with
    its success.
    """
    is_kept: bool
    """Whether the ledger has the message itself, waiting or as a dead letter."""

    def as_dict(self, now: float) -> dict[str, Any]:
        """The record as JSON has it, and these."""
        return record_as_dict(self.record, now) | {
            "steps": [*self.steps],
            "unsent": self.unsent,
            "is_kept": self.is_kept,
        }


def doubts(ledger: Ledger, records: Sequence[Record]) -> Sequence[Doubt]:
    """What is known of each of these records in doubt, in the same order."""
    keys = [record.key for record in records]
    steps, waiting = ledger.steps_of(keys), ledger.mailbox.of_many(keys)
    return [_doubt(each, steps[each.key], waiting.get(each.key, [])) for each in records]


def _doubt(record: Record, steps: Iterable[str], waiting: Sequence[WaitingMessage]) -> Doubt:
    unsent = sum(each.queue == OUTBOX for each in waiting)
    return Doubt(record, [*steps], unsent, len(waiting) > unsent)
