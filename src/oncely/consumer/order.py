"""Order: the deliveries of one message, or of one ordering key, run one at a time."""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from oncely.consumer.source import DueRetries
from oncely.core.turn import AFTER_DOUBT, BEHIND, Turn
from oncely.core.verdicts import End

T = TypeVar("T", bound=Turn)


class Order(Generic[T]):
    """Lets a turn through if no turn of its lane is in front of it.

    Copies of a message stand behind it. If `is_ordered`, a message also stands behind earlier
    messages with the same ordering key: here and, with `retries`, those that wait in the ledger.
    """

    def __init__(self, *, is_ordered: bool, retries: DueRetries | None = None) -> None:
        self._is_ordered = is_ordered
        self._retries = retries if is_ordered else None
        self._behind: dict[Hashable, deque[T] | None] = {}
        """The turns behind the one in front, by lane."""

    def enter(self, turns: Sequence[T]) -> list[T]:
        """Add these turns; return those that stand in front."""
        first: list[T] = []
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

    def keep(self, turns: Sequence[T]) -> None:
        """End those new turns of which an earlier message of their order waits in the ledger: they
        wait behind it, there.
        """
        if self._retries is None:
            return
        new = [turn for turn in turns if turn.taken is None and turn.ending is None]
        behind = self._retries.behind(new)
        for turn in new if behind is None else behind:
            turn.ended_as(AFTER_DOUBT if behind is None else BEHIND)
            turn.waits = behind is not None

    def leave(self, turns: Sequence[T]) -> list[T]:
        """Remove these turns, which are done; return those that stand in front now."""
        ready: list[T] = []
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

    def _lane(self, turn: T) -> Hashable | None:
        if self._is_ordered and turn.message is not None and turn.message.key is not None:
            return turn.message.key
        return turn.key
