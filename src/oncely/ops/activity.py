"""What went on in a ledger."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from oncely.core.activity import PERIOD_S, Activity, Run, quantile_s
from oncely.ledger.ledger import Ledger
from oncely.ops.workers import workers

HOUR_S, DAY_S = 3_600.0, 86_400.0
_COUNTED = ("handled", "failed_attempts", "failed", "duplicates", "in_doubt")


@dataclass(frozen=True, slots=True)
class Rates:
    """What came of messages within a time."""

    handled: int
    failed_attempts: int
    failed: int
    """Messages that failed permanently."""
    duplicates: int
    in_doubt: int
    p50_s: float | None
    """Half of the messages took so long from their claim to their end, or less; None where none
    were handled.
    """
    p95_s: float | None
    attempts: float | None
    """On average, of each message that was handled or failed permanently; None where none was."""


class Point(NamedTuple):
    """What came of messages in one period."""

    began: int
    handled: int
    failed_attempts: int
    duplicates: int
    in_doubt: int


@dataclass(frozen=True, slots=True)
class FoundActivity:
    """What went on, by consumer."""

    hour: Mapping[str, Rates]
    day: Mapping[str, Rates]
    points: Sequence[Point]
    """Of all consumers together, for each period of the day, the oldest first."""

    def as_dict(self) -> dict[str, Any]:
        """The activity as JSON has it."""
        return {
            "hour": {name: asdict(rates) for name, rates in self.hour.items()},
            "day": {name: asdict(rates) for name, rates in self.day.items()},
            "periods": [point._asdict() for point in self.points],
        }


def activity(ledger: Ledger) -> FoundActivity:
    """What went on in the last hour and day. Workers tell what they did every ten seconds: what one
    did since it last told is not there yet, and is lost if it is killed.
    """
    now = ledger.now()
    first = int((now - DAY_S) // PERIOD_S + 1) * PERIOD_S
    found = ledger.operations.activity(first)
    periods: dict[int, list[Activity]] = defaultdict(list)
    for each in found:
        periods[each.began].append(each)
    _, *counts = Point._fields
    return FoundActivity(
        hour=_by_consumer(each for each in found if each.began > now - HOUR_S),
        day=_by_consumer(found),
        points=[
            Point(began, *(sum(getattr(each, name) for each in periods[began]) for name in counts))
            for began in range(first, int(now) + 1, PERIOD_S)
        ],
    )


def _by_consumer(found: Iterable[Activity]) -> Mapping[str, Rates]:
    groups: dict[str, list[Activity]] = defaultdict(list)
    for each in found:
        groups[each.consumer].append(each)
    rates = {}
    for consumer, its in sorted(groups.items()):
        seconds = [each.seconds for each in its]
        counts = {name: sum(getattr(each, name) for each in its) for name in _COUNTED}
        ended = counts["handled"] + counts["failed"]
        attempts = counts["handled"] + counts["failed_attempts"]
        rates[consumer] = Rates(
            **counts,
            p50_s=quantile_s(seconds, 0.5),
            p95_s=quantile_s(seconds, 0.95),
            attempts=round(attempts / ended, 2) if ended else None,
        )
    return rates


class SeenRun(NamedTuple):
    """A run on Spark, and whether it was killed."""

    run: Run
    is_killed: bool
    """It has not ended, and its worker is dead: its totals are those that it told last."""


def runs(ledger: Ledger, limit: int) -> Sequence[SeenRun]:
    """The runs on Spark that began last, the newest first."""
    # Before the runs, so that none that ends meanwhile is taken for killed.
    asked_at, alive = ledger.now(), {each.worker.id for each in workers(ledger) if each.is_alive}

    def is_killed(run: Run) -> bool:
        is_over = run.ended is not None or run.began >= asked_at
        return not is_over and run.id.partition(".")[0] not in alive

    return [SeenRun(run, is_killed(run)) for run in ledger.operations.runs(limit)]
