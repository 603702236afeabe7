"""Receiving from one queue, and acknowledging its deliveries."""

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pika import spec

from oncely._util.clock import monotonic
from oncely.core.errors import TransportError
from oncely.core.verdicts import Ack, Acknowledgement, Requeue
from oncely.transports.rabbitmq.connection import Channel, Line, Reply, succeed
from oncely.transports.rabbitmq.messages import arrived
from oncely.transports.rabbitmq.url_options import RabbitSettings
from oncely.transports.rabbitmq.wire import Sent
from oncely.transports.transport import Delivery

_QUIET_S = 5.0
"""After so long without a message, a channel that owes no acknowledgement is replaced. If a quorum
queue is deleted and created again at once, the broker silently moves its consumers to the new
queue, whose deliveries may never arrive.
"""
_COUNTED_S = 1.0
"""How long nothing has to arrive until the broker's count of 0 is believed."""


class Tag(NamedTuple):
    """Identifies a delivery."""

    intake: "Intake"
    number: int


class Intake(Channel):
    """A channel that consumes one queue, and its unacknowledged deliveries.

    At most `prefetch` messages are unacknowledged, and one more that `is_drained` has found.

    Only the line's thread uses the unacknowledged deliveries. When the channel is closed, for any
    reason, the broker has requeued them.
    """

    def __init__(self, line: Line, queue: str, settings: RabbitSettings) -> None:
        self._queue = queue
        self._settings = settings
        self._arrivals: SimpleQueue[Delivery | None] = SimpleQueue()
        """Deliveries, and None at the end, for waiting receivers."""
        self._unacknowledged: dict[int, None] = {}
        """The numbers of unacknowledged deliveries, in the order of arrival."""
        self._quiet_since = monotonic()
        self._looking = threading.Lock()
        self._looked: Reply
        super().__init__(line)
        self.ask(self._start)

    def take(self, limit: int, until: float) -> list[Delivery]:
        """The deliveries that have arrived, at most so many; waits until that moment for the first.
        Empty if the channel is closed.
        """
        taken: list[Delivery] = []
        while len(taken) < limit:
            try:
                arrival = self._arrivals.get_nowait()
            except Empty:
                if taken:
                    break
                arrival = self._wait(until)
            if arrival is None:
                break
            taken.append(arrival)
        if self.is_over:
            self._arrivals.put(None)
        return taken

    def acknowledge(self, verdicts: Sequence[tuple[int, Acknowledgement]]) -> int:
        """Acknowledge each delivery; return how many are too late."""

        def begin(future: "Future[int]") -> None:
            late = self._apply(verdicts)
            self.line.when_written(lambda: succeed(future, late))

        return self.line.ask(begin)

    def is_drained(self, *, may_get: bool) -> bool:
        """Whether no message waits in the queue, and none is unacknowledged here."""
        with self._looking:
            # The broker's count is late at times; only an empty basic.get is sure. If the count is
            # not 0, a basic.get would overtake messages that are on their way.
            if self._unacknowledged:
                return False
            declared = self.call(self.raw.queue_declare, self._queue, passive=True)
            if declared.method.message_count:
                return False
            if not may_get:
                return monotonic() > self._quiet_since + _COUNTED_S
            self.ask(self._get)
            # Before this answer all earlier deliveries have arrived.
            self.call(self.raw.basic_qos, prefetch_count=1)
            return not self._unacknowledged

    def _wait(self, until: float) -> Delivery | None:
        while (left_s := until - monotonic()) > 0:
            try:
                return self._arrivals.get(timeout=min(left_s, _QUIET_S))
            except Empty:
                if monotonic() > self._quiet_since + _QUIET_S:
                    self.ask(self._retire)
        return None

    # ---- On the line's thread ------------------------------------------------------------------

    def lost(self) -> None:
        self.line.wire.receivers.pop(self.raw.channel_number, None)
        self._unacknowledged.clear()
        self._arrivals.put(None)

    def _start(self, reply: Reply) -> None:
        self.line.wire.receivers[self.raw.channel_number] = self._arrive
        self.raw.add_on_cancel_callback(
            lambda _: self._give_up(f"queue {self._queue!r} was deleted")
        )
        empty = [spec.Basic.GetEmpty]
        self.raw.add_callback(lambda _: self._looked(None), empty, one_shot=False)
        self.raw.basic_qos(prefetch_count=self._settings.prefetch)
        # Not a bare number: RabbitMQ 3.10 uses such tags for basic.get, and confuses the two. The
        # messages do not go through pika.
        self.raw.basic_consume(
            self._queue, lambda *_: None, consumer_tag="oncely-0", callback=reply
        )

    def _arrive(self, sent: Sent) -> None:
        self._unacknowledged[sent.number] = None
        self._quiet_since = monotonic()
        number, redelivered, properties, body = sent
        message, problem, times = arrived(
            properties, body, redelivered=redelivered, max_bytes=self._settings.max_bytes
        )
        count = times if self._settings.counts_deliveries else 1
        tag = Tag(self, number)
        self._arrivals.put(Delivery(message, self._queue, count, tag, problem, redelivered))

    def _get(self, reply: Reply) -> None:
        """Get a message from the queue, as if the broker had sent it."""

        def on_got(_: object, got: spec.Basic.GetOk, __: object, body: bytes) -> None:
            properties = self.line.wire.properties.pop(self.raw.channel_number)
            number, redelivered = got.delivery_tag or 0, bool(got.redelivered)
            self._arrive(Sent(number, redelivered, properties, body))
            reply(got)

        self._looked = reply
        self.raw.basic_get(self._queue, on_got)

    def _apply(self, verdicts: Iterable[tuple[int, Acknowledgement]]) -> int:
        acknowledged: list[int] = []
        late = 0
        for number, verdict in verdicts:
            if number not in self._unacknowledged:
                late += 1
                continue
            del self._unacknowledged[number]
            if isinstance(verdict, Ack):
                acknowledged.append(number)
            else:
                # Before the multiple acknowledgement, which must not include this message.
                self.raw.basic_reject(number, requeue=isinstance(verdict, Requeue))
        first_left = next(iter(self._unacknowledged), math.inf)
        together = max((number for number in acknowledged if number < first_left), default=0)
        if together:
            self.raw.basic_ack(together, multiple=True)
        for number in acknowledged:
            if number > first_left:
                self.raw.basic_ack(number)
        return late

    def _retire(self, reply: Reply) -> None:
        self._quiet_since = monotonic()
        if not self._unacknowledged:
            self._give_up(f"nothing came out of queue {self._queue!r}")
        reply(None)

    def _give_up(self, why: str) -> None:
        self.error = TransportError(f"RabbitMQ: {why}")
        self.lost()
        if self.raw.is_open:
            self.raw.close()
