"""What a consumer holds, unacknowledged, until it is tried again."""

import time
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count

from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Delay

_MOST_SEEN = 10_000


class PutOff:
    """Turns whose time comes later, each after the delay that its ending says."""

    def __init__(self) -> None:
        self._by_time: list[tuple[float, int, DeliveryTurn]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, turns: Sequence[DeliveryTurn]) -> None:
        """Hold these."""
        now = time.monotonic()
        for turn in turns:
            delay_s = turn.verdict.delay_s if isinstance(turn.verdict, Delay) else 0.0
            heappush(self._by_time, (now + delay_s, next(self._numbers), turn))

    def due(self) -> list[DeliveryTurn]:
        """Those whose time has come: they are not held any more."""
        now = time.monotonic()
        due = []
        while self._by_time and self._by_time[0][0] <= now:
            due.append(heappop(self._by_time)[2])
        return due


class FirstSeen:
    """When ids were first seen by this process; of many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def ago(self, message_id: str) -> float:
        """How many seconds ago that was: none, where it is now."""
        now = time.monotonic()
        while len(self._at) > _MOST_SEEN:
            del self._at[next(iter(self._at))]
        return now - self._at.setdefault(message_id, now)
