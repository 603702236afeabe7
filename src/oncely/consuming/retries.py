"""Retries: a consumer's messages that wait in the ledger, taken when they are due."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from oncely._util.clock import monotonic
from oncely._util.outage import Outage
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import StoreDenied, StoreError
from oncely.core.turn import AFTER_DOUBT, BEHIND
from oncely.core.verdicts import Delay
from oncely.core.waiting import WaitingMessage
from oncely.ledger.mailbox import LedgerMailbox
from oncely.lifecycle.retry_queue import RetryQueue, settle_taken
from oncely.transports.transport import Delivery

_LOOK_S = 0.5
"""How often to look for messages that other workers have stored there."""


@dataclass(eq=False)
class Retries:
    """Takes messages of `queue` that are due, as deliveries, and acknowledges them in the ledger.

    No other worker is given a taken message for `hold_s`: if this process dies, the message is
    available again after that time.
    """

    _mailbox: LedgerMailbox
    _queue: RetryQueue
    _hold_s: float
    _outage: Outage
    _look_at: float = 0.0
    """`clock.monotonic()` at which the next message may be due."""
    _are_due: bool = False
    _yields: bool = False
    """Whether to leave the next due messages to other workers: some may be of a type that no
    handler here takes."""

    def are_due(self) -> bool:
        """Whether messages are due, as far as is known; asks the ledger when it is time to."""
        if monotonic() < self._look_at:
            return self._are_due
        self._look_at = monotonic() + _LOOK_S
        free_in_s = None
        with self._noted("looks"):
            free_in_s = self._mailbox.free_in_s(self._queue.name)
        self._are_due = free_in_s == 0
        if self._are_due and self._yields:
            # Once: each other worker has looked before this one looks again. All look at the moment
            # when a message is due, and the one that put it back looks a little before the others.
            self._are_due = self._yields = False
        if free_in_s:
            self._look_in(free_in_s)
        return self._are_due

    def take(self, queue: str, most: int) -> list[Delivery]:
        """At most so many messages that are due, as deliveries of `queue`."""
        taken: Sequence[WaitingMessage] = ()
        with self._noted("takes"):
            taken = self._mailbox.take(most, self._hold_s, queue=self._queue.name)
        # A message that can be taken may stand behind one that cannot.
        self._are_due = len(taken) == most
        return [Delivery(each.message, queue, each.attempts + 1, each) for each in taken]

    @contextmanager
    def _noted(self, by: str) -> Iterator[None]:
        """Note an error of the store, which is tried again. Raises StoreDenied, which would come
        again and again.
        """
        try:
            yield
        except StoreDenied:
            raise
        except StoreError as error:
            self._outage.met(error, by)
        else:
            self._outage.over(by)

    def expect(self, turns: Sequence[DeliveryTurn]) -> None:
        """Note when these turns, or the messages behind them, may be due again."""
        for turn in turns:
            if isinstance(turn.verdict, Delay):
                self._look_in(turn.verdict.delay_s)
                # A message that waits behind another of its order has no delay; this one is of a
                # type that no handler here takes.
                self._yields |= turn.waits and turn.verdict.delay_s > 0
            elif turn.taken is not None and self._queue.lane_of(turn.message) is not None:
                self._look_in(0.0)

    def _look_in(self, delay_s: float) -> None:
        self._look_at = min(self._look_at, monotonic() + delay_s)

    def are_none(self) -> bool:
        """Whether no message waits, due or not. False if the ledger cannot tell."""
        try:
            return self._mailbox.free_in_s(self._queue.name) is None
        except StoreError:
            return False

    def keep_order(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let turns wait in the ledger if an earlier message of their order waits there."""
        lanes = {turn: lane for turn in turns if (lane := self._queue.lane_of(turn.message))}
        if not lanes:
            return
        answers: list[set[str]] = []
        with self._noted("lanes"):
            answers.append(self._mailbox.lanes(self._queue.name, {*lanes.values()}))
        for turn in turns:
            if not answers:
                turn.ended_as(AFTER_DOUBT)
            elif lanes.get(turn) in answers[0]:
                turn.ended_as(BEHIND)
                turn.waits = True

    def acknowledge(self, turns: Sequence[DeliveryTurn]) -> None:
        """Tell the ledger how the taken messages have ended, if it does not know yet. Raises
        StoreError.
        """
        settle_taken(self._mailbox, turns)
