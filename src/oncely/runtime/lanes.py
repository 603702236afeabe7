"""Lanes: of several deliveries of one message, or of one ordering key, one runs at a time."""

import time
from collections import deque
from collections.abc import Hashable, Sequence

from oncely.runtime.turn import Turn
from oncely.transports.base import Delay, Verdict

_RETURN_S = 0.05
"""How much longer what stands behind a delayed message is put off, so that it comes after it."""
_GONE_S = 60.0
"""After which a delayed message is waited for no more: another consumer may have it."""


class Lanes:
    """Lets turns through that stand behind none of theirs.

    Copies of a message stand behind it. Where it `is_ordered`, so do messages behind those of the
    same ordering key that came before; and while one is delayed, those behind it are put off.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self._behind: dict[Hashable, deque[Turn]] = {}
        """Those that stand behind the one that runs, by the lane."""
        self._delayed: dict[str, tuple[str, float]] = {}
        """By ordering key: the id of the message that comes first, and when it does."""

    def enter(self, turns: Sequence[Turn]) -> list[Turn]:
        """Which of these stand in front now. What is to be put off is marked so."""
        return [self._in_front(turn) for turn in turns if self._enters(turn)]

    def leave(self, turns: Sequence[Turn]) -> list[Turn]:
        """These have ended; which of those behind them stand in front now."""
        ready = []
        for turn in turns:
            lane = self._lane(turn)
            behind = self._behind.get(lane)
            if behind:
                ready.append(self._in_front(behind.popleft()))
            elif behind is not None:
                del self._behind[lane]
        return ready

    def note(self, turn: Turn, verdict: Verdict) -> None:
        """What becomes of a turn, for the sake of those behind it."""
        key = turn.message.key
        if not self._is_ordered or key is None or turn.put_off_s is not None:
            return
        if isinstance(verdict, Delay):
            self._delayed[key] = (turn.message.id, time.monotonic() + verdict.delay_s)
        elif self._delayed.get(key, ("",))[0] == turn.message.id:
            del self._delayed[key]

    def _enters(self, turn: Turn) -> bool:
        lane = self._lane(turn)
        if lane is None:
            return True
        if lane in self._behind:
            self._behind[lane].append(turn)
            return False
        self._behind[lane] = deque()
        return True

    def _in_front(self, turn: Turn) -> Turn:
        key = turn.message.key
        if not self._is_ordered or key is None or key not in self._delayed:
            return turn
        first, comes_at = self._delayed[key]
        left_s = comes_at - time.monotonic()
        if left_s < -_GONE_S:
            del self._delayed[key]
        elif first != turn.message.id:
            turn.put_off_s = max(left_s, 0.0) + _RETURN_S
        return turn

    def _lane(self, turn: Turn) -> Hashable | None:
        if self._is_ordered and turn.message.key is not None:
            return turn.message.key
        return turn.key
