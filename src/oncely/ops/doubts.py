"""Messages in doubt, with what helps to decide about each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oncely.core.record import Record
from oncely.core.waiting import OUTBOX
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
    found = []
    for record in records:
        queues = [each.queue for each in waiting.get(record.key, [])]
        unsent = queues.count(OUTBOX)
        found.append(Doubt(record, [*steps[record.key]], unsent, len(queues) > unsent))
    return found
