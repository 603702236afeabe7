"""Lanes: of several deliveries of one message, or of one ordering key, one runs at a time."""

from collections import deque
from collections.abc import Hashable, Sequence

from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Ack


class Lanes:
    """Lets turns through that stand behind none of theirs.

    Copies of a message stand behind it. Where it `is_ordered`, so do messages behind those of the
    same ordering key that came before.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self._behind: dict[Hashable, deque[DeliveryTurn] | None] = {}
        """Those that stand behind the one in front, by the lane."""

    def enter(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """Which of these stand in front now."""
        return [turn for turn in turns if self._enters(turn)]

    def leave(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """These are done with; which of those behind them stand in front now."""
        ready: list[DeliveryTurn] = []
        for turn in turns:
            lane = self._lane(turn)
            behind = self._behind.pop(lane, None)
            if not behind:
                continue
            if lane == turn.key and isinstance(turn.verdict, Ack):
                # Copies of what is done: the ledger turns all of them away together.
                ready += behind
            else:
                ready.append(behind.popleft())
                self._behind[lane] = behind
        return ready

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

    def _lane(self, turn: DeliveryTurn) -> Hashable | None:
        if self._is_ordered and turn.message.key is not None:
            return turn.message.key
        return turn.key
