"""A ledger at a glance: whether anything is stuck, what, and for how long."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from oncely.core.shown import span
from oncely.ledger.ledger import Ledger
from oncely.ops.status import Status, status
from oncely.ops.upkeep import problems

LATE_S = 60.0
"""What is due and has waited for longer than this is stuck: a worker or relay takes it sooner."""


_SINGULARS = {"their": "its", "letters": "letter", "messages": "message", "retries": "retry"}


class Snag(StrEnum):
    """What can be stuck; the values are the words for it."""

    IN_DOUBT = "in doubt"
    FOR_SENDER = "waiting for their sender"
    DEAD_LETTERS = "dead letters"
    RETRIES = "retries overdue"
    OUTBOX = "deferred messages not sent"
    SET_ASIDE = "deferred messages set aside"
    QUEUE = "messages not taken from a queue"


_COMMANDS = {
    Snag.IN_DOUBT: "list --state in-doubt",
    Snag.FOR_SENDER: "list --state waits-for-its-sender",
    Snag.DEAD_LETTERS: "dead list",
    Snag.RETRIES: "waiting",
    Snag.OUTBOX: "outbox list",
    Snag.SET_ASIDE: "outbox list --refused",
    Snag.QUEUE: "status",
}


@dataclass(frozen=True, slots=True)
class StuckMessages:
    """Messages that do not go on by themselves, or not in time."""

    what: Snag
    count: int
    oldest_s: float | None
    """For how long the oldest has been so; None where that is not kept."""

    @property
    def command(self) -> str:
        """What to type to see them."""
        return f"oncely {_COMMANDS[self.what]}"

    @property
    def sentence(self) -> str:
        """All of that in words."""
        names = {} if self.count > 1 else _SINGULARS
        words = [names.get(word, word) for word in self.what.split()]
        oldest = "" if self.oldest_s is None else f" (oldest: {span(self.oldest_s)})"
        return f"{self.count:,} {' '.join(words)}{oldest}"


@dataclass(frozen=True, slots=True)
class LedgerOverview:
    """Where a ledger stands, and what of it calls for somebody."""

    status: Status
    stuck: Sequence[StuckMessages]
    problems: Sequence[str]
    """As `problems` gives them."""

    @property
    def verdict(self) -> str:
        """All that is stuck in a line."""
        if not self.stuck:
            return "nothing is stuck"
        return "stuck: " + "; ".join(each.sentence for each in self.stuck)

    def as_dict(self) -> dict[str, Any]:
        """The overview as JSON has it."""
        return {
            "verdict": self.verdict,
            "stuck": [asdict(each) for each in self.stuck],
            "problems": [*self.problems],
            **self.status.as_dict(),
        }


def overview(ledger: Ledger, known: Sequence[str] | None = None) -> LedgerOverview:
    """Where the ledger stands, what is stuck in it, and what can lose or repeat messages. `known`
    are those problems, if they were asked for lately: `problems` compares the whole schema.
    """
    found = status(ledger)
    wrong = problems(ledger, program="reader") if known is None else known
    return LedgerOverview(found, [*stuck(found)], wrong)


def stuck(found: Status) -> Iterator[StuckMessages]:
    """What does not go on by itself, or not in time."""
    total, backlog = found.total, found.backlog
    if total.in_doubt:
        yield StuckMessages(Snag.IN_DOUBT, total.in_doubt, total.in_doubt_s)
    if total.waiting_for_sender:
        yield StuckMessages(Snag.FOR_SENDER, total.waiting_for_sender, total.waiting_for_sender_s)
    if total.dead_letters:
        yield StuckMessages(Snag.DEAD_LETTERS, total.dead_letters, None)
    if total.waiting_lag_s > LATE_S:
        yield StuckMessages(Snag.RETRIES, total.waiting, total.waiting_lag_s)
    if backlog.lag_s > LATE_S:
        yield StuckMessages(Snag.OUTBOX, backlog.waiting, backlog.lag_s)
    if backlog.set_aside:
        yield StuckMessages(Snag.SET_ASIDE, backlog.set_aside, None)
    late = [queue for queue in found.queues.values() if queue.lag_s > LATE_S]
    if late:
        waiting = sum(queue.waiting for queue in late)
        yield StuckMessages(Snag.QUEUE, waiting, max(queue.lag_s for queue in late))
