"""What operators look back at: who works, what came of the messages, which runs there were, and
what people changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PERIOD_S = 300
"""Activity is counted for periods of this length, which begin at multiples of it."""
LATE_S = 30.0
"""A worker that has said nothing for so long was killed, or is cut off."""
BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""Handling times are counted up to each of these; the longer ones come last."""


class Worker(NamedTuple):
    """A process that works with the ledger."""

    id: str
    kind: str
    """consumer, relay, http, webhook, celery, dramatiq, faststream, pika, spark or program."""
    consumer: str
    """Whose messages it handles, or what it relays; empty where it handles whatever comes."""
    host: str
    pid: int
    version: str
    """Of oncely."""
    started: float
    """Seconds since 1970, as all times here, by the store's clock."""
    seen: float
    """When it last said that it is alive."""
    claims: int
    """How many it holds."""
    number: int | None = None
    """As the records of its claims have it; None of an older version."""
    ended: float | None = None
    """When it stopped; None while it works, and where it was killed."""
    lags: Mapping[str, int] | None = None
    """How many messages its broker holds that its consumer has not handled, by the name of the
    queue; None where the broker does not tell, and of an older version.
    """

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.host}:{self.pid}"


class Activity(NamedTuple):
    """What one worker did for one consumer in one period."""

    consumer: str
    worker: str
    began: int
    """The beginning of the period, in seconds since 1970."""
    handled: int = 0
    failed_attempts: int = 0
    failed: int = 0
    """Messages that failed permanently: their attempts are among `failed_attempts`."""
    duplicates: int = 0
    in_doubt: int = 0
    """Claims that were found to be in doubt: refused, or granted again."""
    seconds: Sequence[int] = (0,) * (len(BOUNDS_S) + 1)
    """How many took how long from their claim to their end: a count for each of BOUNDS_S, and one
    for those that took longer.
    """


class Run(NamedTuple):
    """A run on Spark: of a pipeline, of a batch, or of all batches of a stream together."""

    id: str
    """That of its worker, a dot, and what tells it from others of that worker."""
    name: str
    consumer: str
    began: float
    ended: float | None
    """None while it runs, or where it was killed."""
    totals: Mapping[str, Any]
    """What the run counted, as its `--json` has it."""
    error: str | None = None


class AuditEntry(NamedTuple):
    """Something that a person changed, or has begun to change."""

    id: int
    at: float
    by: str
    action: str
    consumer: str
    message_id: str
    """Of the first message, where there are several."""
    chosen: int | None
    """How many were to be changed; None where the action finds them itself, as a purge does."""
    changed: int | None
    """How many were changed; at least so many where `refused` is None. None where nobody knows: the
    action has begun, and has not come to its counts.
    """
    refused: int | None
    """How many were left as they are, because somebody was faster; None until all have had their
    turn.
    """
    why: str

    def changed_in_words(self) -> str:
        """How many were changed, for people."""
        if self.refused is not None and self.changed is not None:
            return f"{self.changed:,}"
        of = "" if self.chosen is None else f" (of {self.chosen:,})"
        if not self.changed:
            return f"begun; how many were changed is not known{of}"
        return f"begun; at least {self.changed:,} changed{of}"


def quantile_s(counts: Iterable[Sequence[int]], share: float) -> float | None:
    """The bound below which that share of the handling times lies; None where there are none.

    Those that are longer than the last bound count as that.
    """
    total = [sum(column) for column in zip(*counts, strict=True)]
    wanted = share * sum(total)
    so_far = 0
    for count, bound in zip(total, (*BOUNDS_S, BOUNDS_S[-1]), strict=False):
        so_far += count
        if count and so_far >= wanted:
            return bound
    return None
