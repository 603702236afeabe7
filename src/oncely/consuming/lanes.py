"""Lanes: the deliveries of one message, or of one ordering key, run one at a time."""

from collections import deque
from collections.abc import Hashable, Sequence

from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import End


class Lanes:
    """Lets a turn through if no turn of its lane is in front of it.

    Copies of a message stand behind it. If `is_ordered`, a message also stands behind earlier
    messages with the same ordering key.
    """

    def __init__(self, *, is_ordered: bool) -> None:
        self._is_ordered = is_ordered
        self._behind: dict[Hashable, deque[DeliveryTurn] | None] = {}
        """The turns behind the one in front, by lane."""

    def enter(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """Add these turns; return those that stand in front."""
        first: list[DeliveryTurn] = []
        for turn in turns:
            lane = self._lane(turn)
            if lane is None:
                first.append(turn)
            elif lane not in self._behind:
                first.append(turn)
                self._behind[lane] = None  # Nearly always nothing stands behind it.
            else:
                behind = self._behind[lane] or deque()
                behind.append(turn)
                self._behind[lane] = behind
        return first

    def leave(self, turns: Sequence[DeliveryTurn]) -> list[DeliveryTurn]:
        """Remove these turns, which are done; return those that stand in front now."""
        ready: list[DeliveryTurn] = []
        for turn in turns:
            lane = self._lane(turn)
            behind = self._behind.pop(lane, None)
            if not behind:
                continue
            is_completed = turn.ending is not None and turn.ending.end is End.COMPLETED
            if lane == turn.key and (is_completed or turn.is_duplicate):
                # Copies: the ledger answers all of them together. Of any other message it may grant
                # one, also where the turn is acknowledged: where its retry is due by now, or its
                # claim was given back. The others would be busy then.
                ready += behind
            else:
                ready.append(behind.popleft())
                self._behind[lane] = behind
        return ready

    def _lane(self, turn: DeliveryTurn) -> Hashable | None:
        if self._is_ordered and turn.message.key is not None:
            return turn.message.key
        return turn.key
