"""Retries: the messages of a consumer that wait in the ledger, brought back when they are due."""

import time
from collections.abc import Sequence

from oncely.consuming.health import Outage
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import StoreError
from oncely.core.rules import AFTER_DOUBT, BEHIND
from oncely.core.verdicts import Delay
from oncely.engine.mailbox import LedgerMailbox
from oncely.lifecycle.keeping import Keeping
from oncely.lifecycle.patience import AWAY
from oncely.lifecycle.taken import settle_taken
from oncely.transports.transport import Delivery

_LOOK_S = 0.5
"""How often it is looked for what others have put there."""


class Retries:
    """What of `keeping` is due, as deliveries; and what becomes of those in the ledger.

    `hold_s` is for how long nobody else is given what was taken: if this process dies, it comes
    back when that is over.
    """

    def __init__(
        self, mailbox: LedgerMailbox, keeping: Keeping, hold_s: float, outage: Outage
    ) -> None:
        self._outage = outage
        self._mailbox = mailbox
        self._keeping = keeping
        self._hold_s = hold_s
        self._look_at = 0.0
        """`time.monotonic()` when the next may be due."""
        self._are_due = False
        self._yields = False
        """Whether others are to have what is due next: what nobody here takes may be among it."""

    def are_due(self) -> bool:
        """Whether some are, as far as is known: looks where it is time to."""
        if time.monotonic() < self._look_at:
            return self._are_due
        self._look_at = time.monotonic() + _LOOK_S
        try:
            free_in_s = self._mailbox.free_in_s(self._keeping.queue)
        except AWAY as error:
            self._outage.met(error)
            free_in_s = None
        self._are_due = free_in_s == 0
        if self._are_due and self._yields:
            # Once: until this one looks again, each of them has looked. All look for what is due to
            # the moment, and whoever put it back a little before the others.
            self._are_due = self._yields = False
        if free_in_s:
            self._look_in(free_in_s)
        return self._are_due

    def take(self, queue: str, most: int) -> list[Delivery]:
        """At most so many that are due, for one who has room for them, as deliveries of `queue`."""
        try:
            taken = self._mailbox.take(most, self._hold_s, queue=self._keeping.queue)
        except AWAY as error:
            self._outage.met(error)
            taken = []
        # One that is free may stand behind one that is not.
        self._are_due = len(taken) == most
        return [Delivery(each.message, queue, each.attempts + 1, each) for each in taken]

    def expect(self, turns: Sequence[DeliveryTurn]) -> None:
        """Some of these may be due again, or what stands behind them."""
        for turn in turns:
            if isinstance(turn.verdict, Delay):
                self._look_in(turn.verdict.delay_s)
                # What stands behind another of its order has no delay; this is of a type that
                # nobody here takes.
                self._yields |= turn.waits and turn.verdict.delay_s > 0
            elif turn.taken is not None and self._keeping.lane_of(turn.message) is not None:
                self._look_in(0.0)

    def _look_in(self, delay_s: float) -> None:
        self._look_at = min(self._look_at, time.monotonic() + delay_s)

    def are_none(self) -> bool:
        """Whether nothing waits, due or not. False where the ledger cannot tell."""
        try:
            return self._mailbox.free_in_s(self._keeping.queue) is None
        except AWAY:
            return False

    def keep_order(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let those wait in the ledger that stand there behind another of their order."""
        lanes = {turn: lane for turn in turns if (lane := self._keeping.lane_of(turn.message))}
        if not lanes:
            return
        try:
            taken = self._mailbox.lanes({*lanes.values()})
        except StoreError as error:
            self._outage.met(error)
            for turn in turns:
                turn.ending = AFTER_DOUBT
            return
        for turn, lane in lanes.items():
            if lane in taken:
                turn.ending, turn.waits = BEHIND, True

    def settle(self, turns: Sequence[DeliveryTurn]) -> None:
        """Let the ledger know what becomes of what was taken, where it does not yet. Raises
        StoreError.
        """
        settle_taken(self._mailbox, turns)
