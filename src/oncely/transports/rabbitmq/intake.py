"""Receiving from one queue: what the broker has delivered, and what becomes of it there."""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import count
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pika import spec

from oncely.core.errors import TransportError
from oncely.core.verdicts import Ack, Requeue, Settlement
from oncely.transports.rabbitmq.allowance import Allowance
from oncely.transports.rabbitmq.connection import Channel, Line, Reply, succeed
from oncely.transports.rabbitmq.messages import arrived
from oncely.transports.rabbitmq.url_options import RabbitSettings
from oncely.transports.rabbitmq.wire import Sent
from oncely.transports.transport import Delivery

_QUIET_S = 5.0
"""After so long without a message, a channel that holds none is replaced. Where a quorum queue is
deleted and made again at once, the broker hands its consumers over to the new one without a word to
them, and what that delivers may never arrive.
"""


class Tag(NamedTuple):
    """By which a delivery is known again."""

    intake: "Intake"
    number: int


class Intake(Channel):
    """A channel that consumes one queue, and all that it was given and has not settled.

    Never more messages than `prefetch` are unsettled, but for one that `is_drained` has found. No
    more bytes than `prefetch_bytes` are, as long as messages are about as large as those before
    them; where they grow, what the broker was allowed to send comes all the same, and nothing more
    until half of what may be here is settled.

    Of what is unsettled only the line's thread makes use. When it is over, by whatever, the broker
    has taken that back.
    """

    def __init__(self, line: Line, queue: str, settings: RabbitSettings) -> None:
        self._queue = queue
        self._settings = settings
        self._allowance = Allowance(settings)
        self._arrivals: SimpleQueue[Delivery | None] = SimpleQueue()
        """None, in the end, for those who wait."""
        self._unsettled: dict[int, None] = {}
        """By their numbers, in the order in which they came."""
        self._consumer = b""
        """The tag of the one that is sent messages; none while they would be too large."""
        self._most = 0
        """What may be here as long as nothing is settled."""
        self._numbers = count()
        self._last_of_former = 0
        """The number of the last message that came to another consumer."""
        self._quiet_since = time.monotonic()
        self._looking = threading.Lock()
        self._looked: Reply
        super().__init__(line)
        self.ask(self._start)

    # ---- For receivers -------------------------------------------------------------------------

    def take(self, limit: int, until: float) -> list[Delivery]:
        """What has come, at most so many; waits until that moment for the first. Nothing as soon as
        it is over.
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

    def settle(self, verdicts: Sequence[tuple[int, Settlement]]) -> int:
        """Settle each; return how many come too late."""

        def begin(future: "Future[int]") -> None:
            late = self._settle(verdicts)
            self.line.when_written(lambda: succeed(future, late))

        return self.line.ask(begin)

    def is_drained(self) -> bool:
        """Whether nothing waits in the queue, nor is here unsettled."""
        with self._looking:
            # What the broker counts is late at times; to get none is a sure sign. Where it counts
            # some, to get one would overtake those that are on their way.
            if self._unsettled or self._count():
                return False
            self._look()
            return not self._unsettled

    def _wait(self, until: float) -> Delivery | None:
        while (left_s := until - time.monotonic()) > 0:
            try:
                return self._arrivals.get(timeout=min(left_s, _QUIET_S))
            except Empty:
                if time.monotonic() > self._quiet_since + _QUIET_S:
                    self.ask(self._retire)
        return None

    def _look(self) -> None:
        """Get a message out of the queue, as if it had been sent."""
        self.ask(self._get)
        # By this answer all has arrived that was delivered before.
        self.call(self.raw.basic_qos, prefetch_count=1)

    def _count(self) -> int:
        declared = self.call(self.raw.queue_declare, self._queue, passive=True)
        return int(declared.method.message_count)

    def _delivery(self, sent: Sent) -> Delivery:
        number, redelivered, properties, body, _ = sent
        message, problem, times = arrived(
            properties, body, redelivered=redelivered, max_bytes=self._settings.max_bytes
        )
        count = times if self._settings.counts_deliveries else 1
        return Delivery(message, self._queue, count, Tag(self, number), problem)

    # ---- On the line's thread ------------------------------------------------------------------

    def lost(self) -> None:
        self.line.wire.receivers.pop(self.raw.channel_number, None)
        self._unsettled.clear()
        self._arrivals.put(None)

    def _start(self, reply: Reply) -> None:
        self.line.wire.receivers[self.raw.channel_number] = self._on_sent
        self.raw.add_on_cancel_callback(self._on_cancel)
        empty = [spec.Basic.GetEmpty]
        self.raw.add_callback(lambda _: self._looked(None), empty, one_shot=False)
        self._consume(reply)

    def _consume(self, reply: Reply | None = None) -> None:
        # No bare number: RabbitMQ 3.10 calls those who get messages so, and confuses them.
        tag = f"oncely-{next(self._numbers)}"
        self._consumer = tag.encode()
        self._most = len(self._unsettled) + self._allowance.share
        self.raw.basic_qos(prefetch_count=self._allowance.share)
        # Pika is given none of its messages.
        self.raw.basic_consume(self._queue, lambda *_: None, consumer_tag=tag, callback=reply)

    def _on_sent(self, sent: Sent) -> None:
        is_too_much = self._arrive(sent)
        if sent.consumer != self._consumer:
            self._last_of_former = sent.number
        elif is_too_much:
            self._stop()
        elif len(self._unsettled) >= self._allowance.share:
            self._grow()

    def _arrive(self, sent: Sent) -> bool:
        """Whether the broker may send too much."""
        self._unsettled[sent.number] = None
        self._quiet_since = time.monotonic()
        self._arrivals.put(self._delivery(sent))
        return self._allowance.see(len(sent.properties) + len(sent.body))

    def _grow(self) -> None:
        """Have more sent where sizes allow it, and all is here that may be."""
        held = len(self._unsettled)
        is_stuck = held >= self._most
        if not is_stuck and self._first_unsettled() <= self._last_of_former:
            return
        if self._allowance.grow(held, is_stuck=is_stuck):
            # One after the other: from two at once messages come out of order.
            self._stop()
            self._consume()

    def _stop(self) -> None:
        """Have nothing more sent. What is on its way comes: pika, which would reject it, does not
        see it.
        """
        cancel = spec.Basic.Cancel(consumer_tag=self._consumer.decode(), nowait=True)
        self.line.wire.say(self.raw.channel_number, cancel)
        self._consumer = b""
        self._last_of_former = next(reversed(self._unsettled))

    def _resume(self) -> None:
        """Have messages sent again, as few as fit, when there is room."""
        if not self._consumer and len(self._unsettled) <= self._allowance.fitting // 2:
            self._allowance.shrink()
            self._consume()

    def _get(self, reply: Reply) -> None:
        def on_got(_: object, got: spec.Basic.GetOk, __: object, body: bytes) -> None:
            properties = self.line.wire.properties.pop(self.raw.channel_number)
            number, redelivered = got.delivery_tag or 0, bool(got.redelivered)
            self._arrive(Sent(number, redelivered, properties, body, b""))
            reply(got)

        self._looked = reply
        self.raw.basic_get(self._queue, on_got)

    def _settle(self, verdicts: Iterable[tuple[int, Settlement]]) -> int:
        acknowledged: list[int] = []
        late = 0
        for number, verdict in verdicts:
            if number not in self._unsettled:
                late += 1
                continue
            del self._unsettled[number]
            if isinstance(verdict, Ack):
                acknowledged.append(number)
            else:
                # Before what is acknowledged together: that must not include it.
                self.raw.basic_reject(number, requeue=isinstance(verdict, Requeue))
        self._acknowledge(acknowledged)
        self._resume()
        return late

    def _acknowledge(self, numbers: Iterable[int]) -> None:
        first_left = self._first_unsettled()
        together = max((number for number in numbers if number < first_left), default=0)
        if together:
            self.raw.basic_ack(together, multiple=True)
        for number in numbers:
            if number > first_left:
                self.raw.basic_ack(number)

    def _first_unsettled(self) -> float:
        return next(iter(self._unsettled), math.inf)

    def _retire(self, reply: Reply) -> None:
        self._quiet_since = time.monotonic()
        if not self._unsettled:
            self._give_up(f"nothing came out of queue {self._queue!r}")
        reply(None)

    def _on_cancel(self, _: object) -> None:
        self._give_up(f"queue {self._queue!r} was deleted")

    def _give_up(self, why: str) -> None:
        self.error = TransportError(f"RabbitMQ: {why}")
        self.lost()
        if self.raw.is_open:
            self.raw.close()
