"""Delayed turns: a consumer holds them, unacknowledged, until their retry."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from oncely._util.clock import monotonic
from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Delay

_MOST_SEEN = 10_000


class PutOff:
    """Turns that run again later, each after the delay of its ending."""

    def __init__(self) -> None:
        self._by_time: list[tuple[float, int, DeliveryTurn]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, turns: Sequence[DeliveryTurn]) -> None:
        """Hold these turns."""
        now = monotonic()
        for turn in turns:
            # They are those of its whole window.
            turn.requests = None
            delay_s = turn.verdict.delay_s if isinstance(turn.verdict, Delay) else 0.0
            heappush(self._by_time, (now + delay_s, next(self._numbers), turn))

    def due(self) -> list[DeliveryTurn]:
        """Take out the turns that are due."""
        now = monotonic()
        due = []
        while self._by_time and self._by_time[0][0] <= now:
            due.append(heappop(self._by_time)[2])
        return due


class FirstSeen:
    """When this process has first seen ids; if there are too many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def ago(self, message_id: str) -> float:
        """How many seconds ago the id was first seen: 0 if it is seen now."""
        now = monotonic()
        while len(self._at) > _MOST_SEEN:
            del self._at[next(iter(self._at))]
        return now - self._at.setdefault(message_id, now)
