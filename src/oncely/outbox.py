"""Relay: publishes deferred messages after their handlers have succeeded. And `publish`."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta

from oncely._util.clock import monotonic
from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely._util.pauses import pause_s
from oncely.core.durations import Duration, positive_seconds
from oncely.core.errors import (
    BrokerRefused,
    ConfigError,
    ContentionError,
    PublishRefused,
    StoreUnavailable,
    TransportError,
    describe,
)
from oncely.core.errors_by_kind import Kinds, with_error
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.ledger.ledger import Ledger, checked_ledger
from oncely.ledger.settle import RelayObserver
from oncely.stores.store import PutBack
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Clock, Transport

_log = EventLog(__name__)

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
"""Between two tries while the broker or the store is away."""
_FIRST_APART_S = 5.0
_LONGEST_APART_S = 300.0
"""Between two tries at a destination that fails while others do not."""
_SLICE_S = 0.5
"""How long a wait for messages may delay a stop."""
_LOOK_S = 1.0
"""How often it looks while messages wait that cannot be sent yet: no event tells when they can."""
_TIDY_EVERY_S = 300.0
_TIDY_AGE = timedelta(minutes=1)
_TIDY_MOST = 10_000
"""Records that one tidying looks at; the next one looks at more."""
_TIDY_BATCH = 100


@dataclass
class RelayReport:
    """What a relay has done so far."""

    sent: int = 0
    refused: int = 0
    """How often a message was refused that will be retried."""
    set_aside: int = 0
    errors: Kinds = field(default_factory=dict)
    """Refusals and failures of a destination, by kind."""
    error: str | None = None
    """Why it cannot go on at the moment; else which destination last refused or failed, and why."""
    is_away: bool = False
    """Whether it cannot go on at the moment: the broker or the store is away."""


OnProgress = Callable[[RelayReport], None]


class Relay:
    """Publishes the outbox of `ledger` through `transport`, at least once and under the same ids.

    It takes `batch` messages at a time; nobody else is given them for the time of `visibility`.
    Those of one lane (see WaitingMessage) are published one after another, each when the one before
    is confirmed: a batch of a single lane takes as many exchanges with the broker as it has
    messages.
    When that time is over, nothing more of the batch is published; a message that is being
    published at that moment may be published by another relay, too. So choose a time that is much
    longer than a batch takes. Messages that a dead relay has taken wait until it is over.

    A message that its destination cannot take now, because a queue is full, say, is retried after
    the delays of `backoff`, the last of which repeats, and is set aside after `tries`. Until then
    the others of its lane wait for it, those of other lanes do not. A message that is refused
    permanently, because it is too large or leads nowhere, is set aside at once. While the broker is
    away no try is counted, nor while one destination fails without a refusal: that destination is
    tried ever more rarely, and does not hold up the others.

    A message for a missing queue leads nowhere: a relay makes the queue only with `create_queues`.

    Any number of relays may serve one ledger, in threads, processes and machines; one relay may
    be used by several threads. It looks for messages when the store wakes it, and every
    `poll`. Without `metrics` it uses those of the ledger. Raises ConfigError for settings that make
    no sense.
    """

    def __init__(
        self,
        ledger: Ledger,
        transport: Transport,
        *,
        batch: int = 100,
        visibility: Duration = "30s",
        tries: int = 10,
        backoff: Sequence[Duration] | Duration = ("30s", "2m", "5m"),
        poll: Duration = "1s",
        create_queues: bool = False,
        metrics: RelayObserver | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if type(batch) is not int or batch < 1:
            raise ConfigError(f"batch: {batch!r} is not a whole number of 1 or more")
        harm = 'take each message again and again; write "30s"'
        self._visibility_s = positive_seconds(visibility, "visibility", harm)
        harm = 'look for messages without a rest; write "1s"'
        self._poll_s = positive_seconds(poll, "poll", harm)
        self._ledger = checked_ledger(ledger)
        self._transport = transport
        self._batch = batch
        self._retries = Policy(tries=tries, backoff=backoff)
        self._creates = create_queues
        self._observer = metrics or ledger.recorder.metrics
        self._clock = clock
        self._failing: dict[str, tuple[int, Outage]] = {}
        """How often in a row each destination has failed while others did not."""

    def send_waiting(self, parents: Sequence[Key] | None = None) -> RelayReport:
        """Send until nothing more can be taken; only of these `parents`, where any are named.

        A message with a delay, or one that was refused, goes on waiting. Raises TransportError when
        the broker is away: confirmed messages are marked, the others can be taken again at once.
        """
        run = _RelayRun(self, threading.Event(), _parents=parents)
        try:
            run.go_on()
        except TransportError:
            run.let_go()
            raise
        return run.report

    def drain(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> RelayReport:
        """As `send_waiting`, for all messages, until `stop` is set; all published ones are marked.

        Handled messages that have nothing left to send are completed, too. `on_progress` is called
        after each batch.
        """
        self._ledger.check_privileges("relay")
        run = _RelayRun(self, stop, on_progress)
        run.go_on()
        self._tidy(stop)
        return run.report

    def run(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> RelayReport:
        """Send the messages that wait and that come, until `stop` is set; all published ones are
        marked.

        Tidies as `drain` does, on start and every few minutes. While the broker or the store is
        away it tries again, ever more slowly. `on_progress` is called after each batch, and
        whenever the relay has looked for messages.
        """
        self._ledger.check_privileges("relay")
        self._ledger.recorder.works_as("relay")
        run = _RelayRun(self, stop, on_progress)
        outage = Outage(
            _log,
            "relay_stalled",
            "the relay cannot go on: %(reason)s; trying again, ever more slowly",
            "relay_recovered",
            "the relay goes on after %(away_s)s s",
        )
        tidy_at = 0.0
        failures = 0
        while not stop.is_set():
            try:
                if monotonic() >= tidy_at:
                    self._tidy(stop)
                    tidy_at = monotonic() + _TIDY_EVERY_S
                run.go_on()
                failures = 0
                outage.over()
                self._await_messages(stop)
            except (TransportError, StoreUnavailable, ContentionError) as error:
                failures += 1
                outage.met(error)
                run.tell(error)
                stop.wait(pause_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
        run.mark()
        return run.report

    def _await_messages(self, stop: threading.Event) -> None:
        """Return when messages may be there, and when it is time to look, or to stop."""
        some_wait = self._ledger.mailbox.free_in_s(OUTBOX) is not None
        rest_s = min(self._poll_s, _LOOK_S) if some_wait else self._poll_s
        look_at = monotonic() + rest_s
        woken = False
        while not woken and not stop.is_set() and (left_s := look_at - monotonic()) > 0:
            slice_s = min(left_s, _SLICE_S)
            asleep_at = monotonic()
            self._ledger.mailbox.wait(timedelta(seconds=slice_s))
            woken = monotonic() - asleep_at < slice_s

    def _tidy(self, stop: threading.Event) -> None:
        """Complete handled messages that have nothing left to send: their worker died before it."""
        handled = self._ledger.scan(state=State.HANDLED, older_than=_TIDY_AGE, limit=_TIDY_MOST)
        keys = [record.key for record in handled]
        for start in range(0, len(keys), _TIDY_BATCH):
            if stop.is_set():
                return
            self._ledger.mailbox.finish(keys[start : start + _TIDY_BATCH])


# ---- Batches -----------------------------------------------------------------------------------


class _Batch:
    """Messages that were taken together: those left, by lanes, and what became of the rest."""

    def __init__(self, taken: Iterable[WaitingMessage] = (), good_until: float = 0.0) -> None:
        self.good_until = good_until
        """Until then nobody else is given the messages, by this process's own clock."""
        self.confirmed: list[WaitingMessage] = []
        self.refusals: list[PutBack] = []
        self._lanes: dict[str, deque[WaitingMessage]] = {}
        for message in taken:
            self._lanes.setdefault(message.lane, deque()).append(message)

    def heads(self) -> Mapping[str, WaitingMessage]:
        """The first message of each lane, by its lane, all for one destination; empty when none is
        left.

        Two of one lane never go to the transport together: it could refuse the first and take the
        second.
        """
        heads = {lane: messages[0] for lane, messages in self._lanes.items() if messages}
        destination = next((head.destination for head in heads.values()), None)
        return {lane: head for lane, head in heads.items() if head.destination == destination}

    def left(self) -> list[WaitingMessage]:
        """The messages that are not known to be sent."""
        return [message for lane in self._lanes.values() for message in lane]

    def confirm(self, lane: str) -> None:
        """The transport has confirmed the head of the lane."""
        self.confirmed.append(self._lanes[lane].popleft())

    def refuse(self, lane: str, refusal: PutBack) -> None:
        """The transport has refused the head of the lane."""
        self.refusals.append(refusal)
        if refusal.retry_s is None:
            self._lanes[lane].popleft()
        else:
            # The others of the lane wait behind it.
            self._lanes[lane].clear()

    def put_apart(self, destination: str) -> "_Batch":
        """Move what is left for a destination into another batch, and return that."""
        left = self.left()
        apart = _Batch(each for each in left if each.destination == destination)
        self._lanes = _Batch(each for each in left if each.destination != destination)._lanes
        return apart

    def take_in(self, apart: "_Batch") -> None:
        """Take back what was put apart."""
        self._lanes |= apart._lanes


@dataclass
class _RelayRun:
    """Sends batch after batch, for one thread.

    After an error it still has its batch, and goes on with it when it is called again.
    """

    _relay: Relay
    _stop: threading.Event
    _on_progress: OnProgress = lambda _: None
    _parents: Sequence[Key] | None = None
    report: RelayReport = field(default_factory=RelayReport)
    _refused: str | None = None
    """The destination that last refused or failed, and why."""
    _batch: _Batch = field(default_factory=_Batch)

    def go_on(self) -> None:
        """Send until nothing more can be taken, or the event to stop is set.

        `on_progress` is called after each batch and at the end. Raises TransportError when the
        broker is away; messages that it has confirmed before are marked.
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
        """Report how far it is, and the error that stops it, if any."""
        self.report.error = self._refused if error is None else describe(error)
        self.report.is_away = error is not None
        self._on_progress(self.report)

    def mark(self) -> None:
        """Store what became of the messages."""
        batch = self._batch
        if batch.confirmed:
            reached("after_publish")
            self._relay._ledger.mailbox.sent(batch.confirmed)
            self.report.sent += len(batch.confirmed)
            if self._relay._observer is not None:
                self._relay._observer.deferred_sent(batch.confirmed)
            batch.confirmed = []
        if batch.refusals:
            self._relay._ledger.mailbox.put_back(batch.refusals)
            self._count_refused(batch.refusals)
            batch.refusals = []

    def let_go(self) -> None:
        """Put the batch back for others at once, including messages that may have been sent."""
        left = [PutBack(message, None, 0.0, is_try=False) for message in self._batch.left()]
        self._relay._ledger.mailbox.put_back(left)
        self._batch = _Batch()

    def _take(self) -> bool:
        relay = self._relay
        # The clock is read before: their time begins at some moment during the call.
        good_until = relay._clock() + relay._visibility_s
        taken = relay._ledger.mailbox.take(relay._batch, relay._visibility_s, self._parents)
        self._batch = _Batch(taken, good_until)
        return bool(taken)

    def _heads(self) -> Mapping[str, WaitingMessage]:
        """The messages for the next publish, if any are left and still held."""
        return self._batch.heads() if self._relay._clock() < self._batch.good_until else {}

    def _publish_all(self) -> None:
        """Publish the batch. Raises TransportError where every destination has failed, at once or
        later.
        """
        taking: set[str] = set()
        failing: dict[str, tuple[_Batch, TransportError]] = {}
        heads = self._heads()
        while heads:
            destination = next(iter(heads.values())).destination
            try:
                self._publish_heads(heads)
                taking.add(destination)
            except TransportError as error:
                failing[destination] = self._batch.put_apart(destination), error
            heads = {} if self._stop.is_set() else self._heads()
            if heads:
                reached("between_sends")
        is_there = bool(taking - failing.keys())
        for apart, why in failing.values():
            if is_there:
                self._leave(apart.left(), why)
            else:
                self._batch.take_in(apart)
        if failing and not is_there:
            raise next(reversed(failing.values()))[1]

    def _publish_heads(self, heads: Mapping[str, WaitingMessage]) -> None:
        refused = self._publish(list(heads.values()))
        for index, (lane, head) in enumerate(heads.items()):
            if mended := self._relay._failing.pop(head.destination, None):
                mended[1].over()
            if index not in refused:
                self._batch.confirm(lane)
                continue
            reason, is_passing = refused[index]
            retries, attempts = self._relay._retries, head.attempts + 1
            is_over = not is_passing or retries.is_spent(attempts)
            retry_s = None if is_over else retries.delay_s(attempts)
            self._batch.refuse(lane, PutBack(head, describe(reason), retry_s))

    def _leave(self, messages: Sequence[WaitingMessage], error: TransportError) -> None:
        """Put these back: their destination fails, while others do not."""
        destination, reason = messages[0].destination, describe(error)
        failures, outage = self._relay._failing.get(destination) or (0, _outage(destination))
        self._relay._failing[destination] = failures + 1, outage
        retry_s = pause_s(failures, _FIRST_APART_S, _LONGEST_APART_S)
        left = [PutBack(each, reason, retry_s, is_try=False) for each in messages]
        self._relay._ledger.mailbox.put_back(left)
        self._note(f"{destination}: {reason}")
        outage.met(error, count=len(messages), again_in_s=round(retry_s))

    def _publish(self, messages: Sequence[WaitingMessage]) -> Mapping[int, tuple[str, bool]]:
        """The places of refused messages, each with the reason and whether a retry may succeed. All
        others are confirmed.
        """
        destination = messages[0].destination
        try:
            content = [each.message for each in messages]
            self._relay._transport.publish(destination, content, create=self._relay._creates)
        except PublishRefused as error:
            return {index: (why, index in error.passing) for index, why in error.refused.items()}
        except BrokerRefused:
            raise
        except ConfigError as error:
            # The text is not a destination: refused, so that no other message waits for it.
            return dict.fromkeys(range(len(messages)), (str(error), False))
        return {}

    # ---- What is counted and logged ------------------------------------------------------------

    def _note(self, refused: str) -> None:
        self._refused = refused
        self.report.errors = with_error(self.report.errors, refused)

    def _count_refused(self, refusals: Sequence[PutBack]) -> None:
        for refusal in refusals:
            message = refusal.message
            self._note(f"{message.destination}: {refusal.error}")
            told = {
                "consumer": message.parent.consumer,
                "message_id": message.id,
                "destination": message.destination,
                "attempts": message.attempts + 1,
                "reason": refusal.error,
            }
            if refusal.retry_s is None:
                self.report.set_aside += 1
                _log.error(
                    "deferred message '%(message_id)s' of '%(consumer)s' was refused by "
                    "'%(destination)s': %(reason)s; it is set aside for people",
                    extra={"event": "deferred_set_aside", **told},
                )
            else:
                self.report.refused += 1
                _log.warning(
                    "deferred message '%(message_id)s' of '%(consumer)s' was refused by "
                    "'%(destination)s': %(reason)s; attempt %(attempts)s, and it is retried",
                    extra={"event": "deferred_refused", **told},
                )
        if self._relay._observer is not None:
            self._relay._observer.deferred_refused([refusal.message for refusal in refusals])


def _outage(destination: str) -> Outage:
    return Outage(
        _log,
        "destination_unavailable",
        "destination '%(destination)s' fails: %(reason)s; %(count)s messages for it wait for "
        "%(again_in_s)s s, others are sent",
        "destination_available",
        "messages for destination '%(destination)s' are sent again after %(away_s)s s",
        destination=destination,
    )


def publish(
    transport: Transport | str,
    destination: str,
    messages: Sequence[Message] | Message,
    *,
    create: bool = True,
) -> None:
    """Publish messages as `Transport.publish` does. A `transport` that is a URL is opened for this
    call alone. Raises as `Transport.publish` and `open_transport` do.

    To publish in a transaction of your own, see `Inbox.put` and `Inbox.send`.
    """
    many = [messages] if isinstance(messages, Message) else messages
    if not isinstance(transport, str):
        transport.publish(destination, many, create=create)
        return
    with closing(open_transport(transport)) as opened:
        opened.publish(destination, many, create=create)
