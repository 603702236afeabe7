"""Lanes: of several deliveries of one message, or of one ordering key, one runs at a time."""

import time
from collections import deque
from collections.abc import Hashable, Sequence

from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Ack, Delay, Verdict

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
        self._behind: dict[Hashable, deque[DeliveryTurn] | None] = {}
        """Those that stand behind the one that runs, by the lane."""
        self._to_come: dict[str | None, dict[str, float]] = {}
        """By ordering key: the ids of those that were delayed or put off, in their order, and when
        they are redelivered."""

    def enter(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """Which of these stand in front now. Those that are put off are marked so."""
        return [self._in_front(turn) for turn in turns if self._enters(turn)]

    def leave(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """These have ended; which of those behind them stand in front now."""
        ready: list[DeliveryTurn] = []
        for turn in turns:
            lane = self._lane(turn)
            behind = self._behind.pop(lane, None)
            if not behind:
                continue
            if (
                lane == turn.key
                and turn.ending is not None
                and isinstance(turn.ending.verdict, Ack)
            ):
                # Copies of what is done: the ledger turns all of them away together.
                ready += behind
            else:
                ready.append(self._in_front(behind.popleft()))
                self._behind[lane] = behind
        return ready

    def note(self, turn: DeliveryTurn, verdict: Verdict) -> None:
        """What becomes of a turn, for the sake of those behind it."""
        key, message_id = turn.message.key, turn.message.id
        if not self._is_ordered or key is None or turn.put_off_s is not None:
            return
        if isinstance(verdict, Delay):
            coming = self._to_come.setdefault(key, {})
            coming[message_id] = time.monotonic() + verdict.delay_s
        elif key in self._to_come:
            self._to_come[key].pop(message_id, None)
            if not self._to_come[key]:
                del self._to_come[key]

    def _enters(self, turn: DeliveryTurn) -> bool:
        lane = self._lane(turn)
        if lane is None:
            return True
        if lane not in self._behind:
            self._behind[lane] = None  # As nearly always: nothing will stand behind it.
            return True
        behind = self._behind[lane] or deque()
        behind.append(turn)
        self._behind[lane] = behind
        return False

    def _in_front(self, turn: DeliveryTurn) -> DeliveryTurn:
        key = turn.message.key
        if self._is_ordered and key in self._to_come:
            self._put_off(turn, self._to_come[key])
            if not self._to_come[key]:
                del self._to_come[key]
        return turn

    def _put_off(self, turn: DeliveryTurn, coming: dict[str, float]) -> None:
        now = time.monotonic()
        for first, comes_at in [*coming.items()]:
            if first == turn.message.id:
                return
            if now - comes_at < _GONE_S:
                turn.put_off_s = max(comes_at - now, 0.0) + _RETURN_S
                coming[turn.message.id] = now + turn.put_off_s
                return
            del coming[first]

    def _lane(self, turn: DeliveryTurn) -> Hashable | None:
        if self._is_ordered and turn.message.key is not None:
            return turn.message.key
        return turn.key
