"""Sending: takes deferred messages in batches, gets them through a transport, marks what it has."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

from oncely.core.deferred import DeferredMessage
from oncely.core.errors import PublishRefused, describe
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.crashpoints import reached
from oncely.ledger import Ledger
from oncely.stores.base import Refusal
from oncely.transports.base import Clock, Transport

_log = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told what a relay did. Nothing that it does may raise."""

    def deferred_sent(self, messages: Sequence[DeferredMessage]) -> None:
        """The transport has confirmed these; they wait no more."""

    def deferred_refused(self, messages: Sequence[DeferredMessage]) -> None:
        """The transport has refused these, whether or not they are tried again."""


@dataclass
class Report:
    """What a relay has done so far."""

    sent: int = 0
    refused: int = 0
    """How often a message was refused that is to be tried again."""
    set_aside: int = 0
    error: str | None = None
    """Why it cannot go on at the moment: the broker or the store is away."""


OnProgress = Callable[[Report], None]


class Means(NamedTuple):
    """What a relay works with."""

    ledger: Ledger
    transport: Transport
    batch: int
    """Messages that are taken together."""
    hold_s: float
    """How long nobody else is given them."""
    retries: Policy
    """Says how often, and when, a refused message is tried again."""
    observer: Observer | None
    clock: Clock


class Batch:
    """What was taken together: what is left of it, by lanes, and what came of the rest."""

    def __init__(self, taken: Iterable[DeferredMessage] = (), good_until: float = 0.0) -> None:
        self.good_until = good_until
        """Until then nobody else is given the messages, by this process's own clock."""
        self.confirmed: list[DeferredMessage] = []
        self.refusals: list[Refusal] = []
        self._lanes: dict[str, deque[DeferredMessage]] = {}
        for message in taken:
            self._lanes.setdefault(message.lane, deque()).append(message)

    def heads(self) -> Mapping[str, DeferredMessage]:
        """The first of each lane, by its lane, all for one destination; none when none is left.

        Two of one lane never go to the transport together: it could refuse the first and take the
        second.
        """
        heads = {lane: messages[0] for lane, messages in self._lanes.items()}
        destination = next((head.destination for head in heads.values()), None)
        return {lane: head for lane, head in heads.items() if head.destination == destination}

    def confirm(self, lane: str) -> None:
        """The transport has the head of the lane."""
        self.confirmed.append(self._lanes[lane].popleft())
        self._leave_if_empty(lane)

    def refuse(self, lane: str, refusal: Refusal) -> None:
        """The transport does not take the head of the lane."""
        self.refusals.append(refusal)
        if refusal.retry_s is None:
            self._lanes[lane].popleft()
            self._leave_if_empty(lane)
        else:
            # The others of the lane wait behind it.
            del self._lanes[lane]

    def _leave_if_empty(self, lane: str) -> None:
        if not self._lanes[lane]:
            del self._lanes[lane]


class Sending:
    """Sends batch after batch, for one thread.

    After an error it has its batch still in hand, and goes on with that when it is called again.
    """

    def __init__(
        self,
        means: Means,
        stop: threading.Event,
        parents: Sequence[Key] | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self.report = Report()
        self._means = means
        self._stop = stop
        self._parents = parents
        self._on_progress = on_progress
        self._batch = Batch()

    def go_on(self) -> None:
        """Send until nothing more can be taken, or the event to stop is set.

        `on_progress` is told after each batch and in the end. Raises TransportError when the
        broker is away; what it has confirmed before is marked.
        """
        self.mark()
        while not self._stop.is_set() and (self._heads() or self._take()):
            try:
                self._publish_all()
            finally:
                self.mark()
            self.tell(None)
        self.tell(None)

    def tell(self, error: Exception | None) -> None:
        """Tell how far it is, and what is in its way, if anything."""
        self.report.error = None if error is None else describe(error)
        self._on_progress(self.report)

    def mark(self) -> None:
        """Let the ledger know what came of the messages."""
        batch = self._batch
        if batch.confirmed:
            reached("after_publish")
            self._means.ledger.sent(batch.confirmed)
            self._count_sent(batch.confirmed)
            batch.confirmed = []
        if batch.refusals:
            self._means.ledger.put_back(batch.refusals)
            self._count_refused(batch.refusals)
            batch.refusals = []

    def _take(self) -> bool:
        means = self._means
        # The clock is read before: the hold begins at some moment during the call.
        good_until = means.clock() + means.hold_s
        hold = timedelta(seconds=means.hold_s)
        taken = means.ledger.take_deferred(means.batch, hold, self._parents)
        self._batch = Batch(taken, good_until)
        return bool(taken)

    def _heads(self) -> Mapping[str, DeferredMessage]:
        """What goes to the transport next, if anything is in hand and still held."""
        return self._batch.heads() if self._means.clock() < self._batch.good_until else {}

    def _publish_all(self) -> None:
        heads = self._heads()
        while heads:
            refused = self._publish(list(heads.values()))
            for place, (lane, head) in enumerate(heads.items()):
                if place in refused:
                    self._batch.refuse(lane, self._refusal(head, refused[place]))
                else:
                    self._batch.confirm(lane)
            heads = {} if self._stop.is_set() else self._heads()
            if heads:
                reached("between_sends")

    def _publish(self, messages: Sequence[DeferredMessage]) -> Mapping[int, str]:
        """Which are refused, by their places, and why; all others are confirmed."""
        destination = messages[0].destination
        try:
            self._means.transport.publish(destination, [each.message for each in messages])
        except PublishRefused as error:
            return error.refused
        return {}

    def _refusal(self, message: DeferredMessage, reason: str) -> Refusal:
        retries = self._means.retries
        attempts = message.attempts + 1
        retry_s = None if retries.is_spent(attempts) else retries.delay_s(attempts)
        return Refusal(message, describe(reason), retry_s)

    # ---- What is counted and logged ------------------------------------------------------------

    def _count_sent(self, messages: Sequence[DeferredMessage]) -> None:
        self.report.sent += len(messages)
        if self._means.observer is not None:
            self._means.observer.deferred_sent(messages)

    def _count_refused(self, refusals: Sequence[Refusal]) -> None:
        for refusal in refusals:
            if refusal.retry_s is None:
                self.report.set_aside += 1
                _log.error("deferred_set_aside", extra=_told(refusal))
            else:
                self.report.refused += 1
                _log.warning("deferred_refused", extra=_told(refusal))
        if self._means.observer is not None:
            self._means.observer.deferred_refused([refusal.deferred for refusal in refusals])


def _told(refusal: Refusal) -> Mapping[str, object]:
    message = refusal.deferred
    return {
        "consumer": message.parent.consumer,
        "message_id": message.id,
        "destination": message.destination,
        "attempts": message.attempts + 1,
        "reason": refusal.error,
    }
