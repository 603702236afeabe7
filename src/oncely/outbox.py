"""Relay: sends deferred messages, each after the handler that deferred it has succeeded."""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

from oncely._util.crash_points import reached
from oncely.core.deferred import DeferredMessage
from oncely.core.durations import Duration, positive_seconds, seconds
from oncely.core.errors import (
    ConfigError,
    ContentionError,
    PublishRefused,
    StoreUnavailable,
    TransportError,
    describe,
)
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger import Ledger
from oncely.stores.store import PublishRefusal
from oncely.transports.transport import Clock, Transport

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
"""Between two tries while the broker or the store is away."""
_SLICE_S = 0.5
"""How long a wait for messages may keep a stop waiting."""
_LOOK_S = 1.0
"""How often it looks while messages wait that cannot be sent yet: nobody says when they can."""
_TIDY_EVERY_S = 300.0
_TIDY_AGE = timedelta(minutes=1)
_TIDY_MOST = 10_000
"""Records that tidying looks at; what is left comes the next time."""
_TIDY_BATCH = 100


class RelayObserver(Protocol):
    """Is told what a relay did. Nothing that it does may raise."""

    def deferred_sent(self, messages: Sequence[DeferredMessage]) -> None:
        """The transport has confirmed these; they wait no more."""

    def deferred_refused(self, messages: Sequence[DeferredMessage]) -> None:
        """The transport has refused these, whether or not they are tried again."""


@dataclass
class RelayReport:
    """What a relay has done so far."""

    sent: int = 0
    refused: int = 0
    """How often a message was refused that is to be tried again."""
    set_aside: int = 0
    error: str | None = None
    """Why it cannot go on at the moment: the broker or the store is away."""


OnProgress = Callable[[RelayReport], None]


class Relay:
    """Sends what waits in `ledger` through `transport`, at least once and under the same ids.

    It takes `batch` messages at a time; nobody else is given them for the time of `hold`. Those of
    one lane (see DeferredMessage) are published one after another, each when the one before is
    confirmed: a batch of a single lane takes as many exchanges with the broker as it has messages.
    When the hold is over, nothing more of the batch is published; what is being published at that
    moment, another relay may publish too. So choose a hold that outlasts a batch, or a batch that
    is through long before. What a dead relay held waits until the hold is over.

    A message that the transport refuses is tried again after the delays of `backoff`, the last of
    which repeats, and is set aside after `tries`. Until then the others of its lane wait for it,
    those of other lanes do not. While the broker is away no try is counted.

    Any number of relays may serve one ledger, in threads, processes and machines; one relay may
    be used by several threads. It looks for messages when the store wakes it, and every
    `poll`. Raises ConfigError for settings that cannot be meant.
    """

    def __init__(
        self,
        ledger: Ledger,
        transport: Transport,
        *,
        batch: int = 100,
        hold: Duration = "30s",
        tries: int = 10,
        backoff: Sequence[Duration] | Duration = ("30s", "2m", "5m"),
        poll: Duration = "1s",
        metrics: RelayObserver | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if type(batch) is not int or batch < 1:
            raise ConfigError(f"batch: {batch!r} is no whole number of 1 or more")
        hold_s = seconds(hold, "hold")
        if not hold_s:
            raise ConfigError('hold: a hold of zero holds nothing; write "30s"')
        harm = 'look for messages without a rest; write "1s"'
        self._poll_s = positive_seconds(poll, "poll", harm)
        retries = Policy(tries=tries, backoff=backoff)
        self._means = _Means(ledger, transport, batch, hold_s, retries, metrics, clock)

    def send_waiting(self, parents: Sequence[Key] | None = None) -> RelayReport:
        """Send until nothing more can be taken; of these `parents` alone, where any are named.

        What has a delay or was refused goes on waiting. Raises TransportError when the broker is
        away: what it has confirmed is marked, what else was taken waits until the hold is over.
        """
        sending = _Sending(self._means, threading.Event(), parents)
        sending.go_on()
        return sending.report

    def drain(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> RelayReport:
        """As `send_waiting`, for all that waits, until `stop` is set; all published is marked.

        Messages whose handlers have succeeded and of which nothing waits are completed, too.
        `on_progress` is told after each batch.
        """
        sending = _Sending(self._means, stop, on_progress=on_progress)
        sending.go_on()
        self._tidy(stop)
        return sending.report

    def run(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> RelayReport:
        """Send what waits and what comes, until `stop` is set; all that is published is marked.

        Tidies as `drain` does, on start and every few minutes. While the broker or the store is
        away it tries again, ever more slowly. `on_progress` is told after each batch, and whenever
        the relay has looked for messages.
        """
        sending = _Sending(self._means, stop, on_progress=on_progress)
        tidy_at = 0.0
        failures = 0
        while not stop.is_set():
            try:
                if time.monotonic() >= tidy_at:
                    self._tidy(stop)
                    tidy_at = time.monotonic() + _TIDY_EVERY_S
                sending.go_on()
                failures = 0
                self._await_messages(stop)
            except (TransportError, StoreUnavailable, ContentionError) as error:
                failures += 1
                _log.warning("relay_cannot_go_on", exc_info=True)
                sending.tell(error)
                stop.wait(_pause_s(failures))
        sending.mark()
        return sending.report

    def _await_messages(self, stop: threading.Event) -> None:
        """Return when messages may be there, and when it is time to look, or to stop."""
        some_wait = self._means.ledger.mailbox.backlog().waiting > 0
        rest_s = min(self._poll_s, _LOOK_S) if some_wait else self._poll_s
        look_at = time.monotonic() + rest_s
        woken = False
        while not woken and not stop.is_set() and (left_s := look_at - time.monotonic()) > 0:
            slice_s = min(left_s, _SLICE_S)
            asleep_at = time.monotonic()
            self._means.ledger.mailbox.wait(timedelta(seconds=slice_s))
            woken = time.monotonic() - asleep_at < slice_s

    def _tidy(self, stop: threading.Event) -> None:
        """Complete what is handled and of which nothing waits: a worker died between the two."""
        handled = self._means.ledger.scan(
            state=State.HANDLED, older_than=_TIDY_AGE, limit=_TIDY_MOST
        )
        keys = [record.key for record in handled]
        for start in range(0, len(keys), _TIDY_BATCH):
            if stop.is_set():
                return
            self._means.ledger.mailbox.finish(keys[start : start + _TIDY_BATCH])


def _pause_s(failures: int) -> float:
    # Many relays lost the broker at one moment: they should not all be back at one.
    return min(_LONGEST_PAUSE_S, 0.25 * (1 << min(failures, 10))) * random.uniform(0.5, 1.0)  # noqa: S311


# ---- Batches -----------------------------------------------------------------------------------


class _Means(NamedTuple):
    """What a relay works with."""

    ledger: Ledger
    transport: Transport
    batch: int
    """Messages that are taken together."""
    hold_s: float
    """How long nobody else is given them."""
    retries: Policy
    """Says how often, and when, a refused message is tried again."""
    observer: RelayObserver | None
    clock: Clock


class _Batch:
    """What was taken together: what is left of it, by lanes, and what came of the rest."""

    def __init__(self, taken: Iterable[DeferredMessage] = (), good_until: float = 0.0) -> None:
        self.good_until = good_until
        """Until then nobody else is given the messages, by this process's own clock."""
        self.confirmed: list[DeferredMessage] = []
        self.refusals: list[PublishRefusal] = []
        self._lanes: dict[str, deque[DeferredMessage]] = {}
        for message in taken:
            self._lanes.setdefault(message.lane, deque()).append(message)

    def heads(self) -> Mapping[str, DeferredMessage]:
        """The first of each lane, by its lane, all for one destination; none when none is left.

        Two of one lane never go to the transport together: it could refuse the first and take the
        second.
        """
        heads = {lane: messages[0] for lane, messages in self._lanes.items() if messages}
        destination = next((head.destination for head in heads.values()), None)
        return {lane: head for lane, head in heads.items() if head.destination == destination}

    def confirm(self, lane: str) -> None:
        """The transport has the head of the lane."""
        self.confirmed.append(self._lanes[lane].popleft())

    def refuse(self, lane: str, refusal: PublishRefusal) -> None:
        """The transport does not take the head of the lane."""
        self.refusals.append(refusal)
        if refusal.retry_s is None:
            self._lanes[lane].popleft()
        else:
            # The others of the lane wait behind it.
            self._lanes[lane].clear()


class _Sending:
    """Sends batch after batch, for one thread.

    After an error it has its batch still in hand, and goes on with that when it is called again.
    """

    def __init__(
        self,
        means: _Means,
        stop: threading.Event,
        parents: Sequence[Key] | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self.report = RelayReport()
        self._means = means
        self._stop = stop
        self._parents = parents
        self._on_progress = on_progress
        self._batch = _Batch()

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
            self._means.ledger.mailbox.sent(batch.confirmed)
            self._count_sent(batch.confirmed)
            batch.confirmed = []
        if batch.refusals:
            self._means.ledger.mailbox.put_back(batch.refusals)
            self._count_refused(batch.refusals)
            batch.refusals = []

    def _take(self) -> bool:
        means = self._means
        # The clock is read before: the hold begins at some moment during the call.
        good_until = means.clock() + means.hold_s
        hold = timedelta(seconds=means.hold_s)
        taken = means.ledger.mailbox.take(means.batch, hold, self._parents)
        self._batch = _Batch(taken, good_until)
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

    def _refusal(self, message: DeferredMessage, reason: str) -> PublishRefusal:
        retries = self._means.retries
        attempts = message.attempts + 1
        retry_s = None if retries.is_spent(attempts) else retries.delay_s(attempts)
        return PublishRefusal(message, describe(reason), retry_s)

    # ---- What is counted and logged ------------------------------------------------------------

    def _count_sent(self, messages: Sequence[DeferredMessage]) -> None:
        self.report.sent += len(messages)
        if self._means.observer is not None:
            self._means.observer.deferred_sent(messages)

    def _count_refused(self, refusals: Sequence[PublishRefusal]) -> None:
        for refusal in refusals:
            if refusal.retry_s is None:
                self.report.set_aside += 1
                _log.error("deferred_set_aside", extra=_told(refusal))
            else:
                self.report.refused += 1
                _log.warning("deferred_refused", extra=_told(refusal))
        if self._means.observer is not None:
            self._means.observer.deferred_refused([refusal.deferred for refusal in refusals])


def _told(refusal: PublishRefusal) -> Mapping[str, object]:
    message = refusal.deferred
    return {
        "consumer": message.parent.consumer,
        "message_id": message.id,
        "destination": message.destination,
        "attempts": message.attempts + 1,
        "reason": refusal.error,
    }
