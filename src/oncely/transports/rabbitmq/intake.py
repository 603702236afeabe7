"""Receiving from one queue: what the broker has delivered, and what becomes of it there."""

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pika import BasicProperties, spec

from oncely.core.errors import TransportError
from oncely.core.verdicts import Ack, Requeue, Verdict
from oncely.transports.rabbitmq.bell import Bell
from oncely.transports.rabbitmq.connection import Channel, Line, Reply, succeed
from oncely.transports.rabbitmq.messages import Content, count_of, message_of
from oncely.transports.transport import Delivery

_AHEAD_S = 0.25
"""How long the broker is at least not told of what is acknowledged ahead of something that came
before, and at most twice as long: as a rule that follows, and one word is enough for all."""
_FEWEST = 10
_TIMES = 3
"""How many times as many as receivers ask for are sent: while they handle some, others are here and
others on their way. Who handles slowly asks for few, and leaves the rest to other receivers."""


class Terms(NamedTuple):
    """How messages are consumed."""

    prefetch: int
    """How many messages are sent at most that receivers do not hold."""
    counts: bool
    """Whether the broker tells how often it has delivered a message."""


class Arrival(NamedTuple):
    """What the broker has delivered."""

    number: int
    redelivered: bool
    content: Content


class Tag(NamedTuple):
    """By which a delivery is known again."""

    intake: "Intake"
    number: int
    content: Content


class Intake(Channel):
    """A consumer on one queue, and all that it was given and has not settled.

    Of its sets only the line's thread makes use. When it is over, by whatever, the broker has
    taken back what was not settled.
    """

    quiet_s = 5.0
    """After so long without a message, a consumer that holds none is replaced. Where a quorum queue
    is deleted and made again at once, the broker hands its consumers over to the new one without a
    word to them, and what that delivers may never arrive.
    """

    def __init__(self, line: Line, queue: str, terms: Terms, bell: Bell, wanted: int) -> None:
        self._queue = queue
        self._terms = terms
        self._bell = bell
        self._arrivals: deque[Arrival] = deque()
        # In the order in which they came; each with the number of the consumer that was given it.
        self._unsettled: dict[int, int] = {}
        # What is about to be published elsewhere, and to be settled then.
        self._leaving: set[int] = set()
        # Acknowledged ahead of what came before, for long and for less: the broker does not know.
        self._long_ahead: dict[int, int] = {}
        self._ahead: dict[int, int] = {}
        self._consumer = 0
        # What it may be given without more being acknowledged; of that, what it was given.
        self._share = 0
        self._given = 0
        self._wanted = wanted
        self._is_consuming = False
        self._is_renewing = False
        self._quiet_since = time.monotonic()
        super().__init__(line)
        self.ask(self._start)

    def taken(self, limit: int) -> list[Delivery]:
        """What is here to be handled, at most so many."""
        self._wanted = limit
        taken: list[Delivery] = []
        arrivals = self._arrivals
        while len(taken) < limit:
            try:
                arrival = arrivals.popleft()
            except IndexError:
                break
            taken.append(self._delivery(arrival, self._queue))
        return taken

    def rest_s(self) -> float:
        """For how long there will be nothing to do here, unless the bell rings."""
        return 0.0 if self._arrivals or self.is_over else self.quiet_s

    def see_to_it_that_something_can_come(self) -> None:
        """Go on with another consumer where this one has been stopped, where receivers hold all
        that one may have, and where it has been quiet for long.
        """
        if self._has_enough or not self._is_consuming:
            self.ask(self._renew)
        elif time.monotonic() > self._quiet_since + self.quiet_s:
            self.ask(self._retire)

    def settle(self, verdicts: Sequence[tuple[int, Verdict]]) -> tuple[int, set[int]]:
        """Settle what is to be acknowledged or requeued. Returns how many come too late, and
        which are to be published elsewhere: those are this caller's until it calls `leave`.
        """

        def begin(future: "Future[tuple[int, set[int]]]") -> None:
            done = self._settle(verdicts)
            self.line.when_written(lambda: succeed(future, done))

        return self.line.ask(begin)

    def leave(self, numbers: Collection[int], *, is_published: bool) -> int:
        """Acknowledge what was published elsewhere, or hold it again. Returns how many are
        too late.
        """

        def begin(future: "Future[int]") -> None:
            ours = [number for number in numbers if number in self._leaving]
            self._leaving.difference_update(ours)
            late = len(numbers) - len(ours)
            if is_published:
                self._acknowledge({number: self._unsettled.pop(number) for number in ours})
            self.line.when_written(lambda: succeed(future, late))

        return self.line.ask(begin)

    def holds_any(self) -> bool:
        """Whether anything is not settled that the broker has delivered. If not, nothing comes any
        more until somebody receives.
        """
        if not self._unsettled:
            self.ask(self._pause)
        return bool(self._unsettled)

    def tell_all(self) -> None:
        """Let the broker know of all that is acknowledged."""

        def begin(reply: Reply) -> None:
            self._tell_each(self._long_ahead | self._ahead)
            self._long_ahead, self._ahead = {}, {}
            reply(None)

        self.ask(begin)

    def lost(self) -> None:
        self._unsettled.clear()
        self._leaving.clear()
        self._long_ahead, self._ahead = {}, {}
        self._arrivals.clear()
        self._bell.ring()

    def _start(self, reply: Reply) -> None:
        self.raw.add_on_cancel_callback(self._on_cancel)
        self._consume(reply)

    def _consume(self, reply: Reply | None = None) -> None:
        self._consumer += 1
        self._share = self._next_share()
        self._given = 0
        self._is_consuming = True
        self._is_renewing = False
        self.raw.basic_qos(prefetch_count=self._share)
        self.raw.basic_consume(
            self._queue,
            self._on_message,
            consumer_tag=str(self._consumer),
            callback=reply,
        )

    def _next_share(self) -> int:
        # Whoever has many in hand asks for few more: that is no sign of being slow.
        return min(self._terms.prefetch, max(_FEWEST, self._share, _TIMES * self._wanted))

    @property
    def _has_enough(self) -> bool:
        return self._given >= self._share

    @property
    def _has_more(self) -> bool:
        """Whether some of it is not with receivers."""
        return bool(self._arrivals)

    def _renew(self, reply: Reply) -> None:
        if self._is_renewing:
            # Another receiver has asked for it.
            reply(None)
        elif not self._is_consuming:
            self._consume(reply)
        elif self._has_enough and not self._has_more:
            # One after the other: with two at once messages would come out of order.
            self._is_renewing = True
            self._stop(lambda _: self._consume(reply))
        else:
            reply(None)

    def _retire(self, reply: Reply) -> None:
        self._quiet_since = time.monotonic()
        if not self._unsettled:
            self._give_up(TransportError(f"RabbitMQ: nothing came out of queue {self._queue!r}"))
        reply(None)

    def _give_up(self, error: TransportError) -> None:
        self.error = error
        self.lost()
        self.raw.close()

    def _pause(self, reply: Reply) -> None:
        if self._is_consuming and not self._bell.is_heard:
            # Of several that find their queue drained and leave, none must be given what others
            # then do not see.
            self._stop(lambda _: None)
        # By the answer all that was delivered before has arrived.
        self.raw.basic_qos(prefetch_count=self._share, callback=reply)

    def _stop(self, reply: Reply) -> None:
        self._is_consuming = False
        self.raw.basic_cancel(str(self._consumer), callback=reply)

    def _on_message(
        self, _: object, deliver: spec.Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        number = deliver.delivery_tag or 0
        self._unsettled[number] = self._consumer
        self._given += 1
        self._quiet_since = time.monotonic()
        self._arrivals.append(Arrival(number, deliver.redelivered, Content(properties, body)))
        self._bell.ring()

    def _on_cancel(self, _: object) -> None:
        self._give_up(TransportError(f"RabbitMQ: queue {self._queue!r} was deleted"))

    def _delivery(self, arrival: Arrival, queue: str) -> Delivery:
        number, redelivered, content = arrival
        return Delivery(
            message_of(*content),
            queue,
            count_of(content.properties, redelivered) if self._terms.counts else 1,
            Tag(self, number, content),
        )

    def _settle(self, verdicts: Sequence[tuple[int, Verdict]]) -> tuple[int, set[int]]:
        acknowledged: dict[int, int] = {}
        requeued: dict[int, int] = {}
        moved: set[int] = set()
        late = 0
        for number, verdict in verdicts:
            if number not in self._unsettled or number in self._leaving or number in moved:
                late += 1
            elif isinstance(verdict, Ack):
                acknowledged[number] = self._unsettled.pop(number)
            elif isinstance(verdict, Requeue):
                requeued[number] = self._unsettled.pop(number)
            else:
                moved.add(number)
        self._leaving |= moved
        # First what is requeued, which no later acknowledgement of many must include.
        self._requeue(requeued)
        self._acknowledge(acknowledged)
        return late, moved

    def _requeue(self, settled: dict[int, int]) -> None:
        if settled and self._is_consuming and not self._bell.is_heard:
            # Else it would come back here, where nobody is waiting, and not to who waits elsewhere.
            self._stop(lambda _: None)
        for number, consumer in settled.items():
            self.raw.basic_nack(number, requeue=True)
            self._make_room(consumer)

    def _acknowledge(self, settled: dict[int, int]) -> None:
        """Tell the broker: of all together below the first that is not settled; of others soon."""
        first_left = next(iter(self._unsettled), math.inf)
        together = 0
        was_any = bool(self._long_ahead or self._ahead)
        for number, consumer in (self._long_ahead | self._ahead | settled).items():
            if number < first_left:
                together = max(together, number)
                self._make_room(consumer)
        if together:
            self.raw.basic_ack(together, multiple=True)
        self._long_ahead = _beyond(first_left, self._long_ahead)
        self._ahead = _beyond(first_left, self._ahead | settled)
        if self._ahead and not was_any:
            self.line.call_later(_AHEAD_S, self._tell_soon)

    def _tell_soon(self) -> None:
        if self.is_over:
            return
        self._tell_each(self._long_ahead)
        self._long_ahead, self._ahead = self._ahead, {}
        if self._long_ahead:
            self.line.call_later(_AHEAD_S, self._tell_soon)

    def _tell_each(self, settled: dict[int, int]) -> None:
        for number, consumer in settled.items():
            self.raw.basic_ack(number)
            self._make_room(consumer)

    def _make_room(self, consumer: int) -> None:
        """One that it was given is off the broker's books."""
        if consumer == self._consumer:
            self._given -= 1


def _beyond(first_left: float, settled: dict[int, int]) -> dict[int, int]:
    return {number: consumer for number, consumer in settled.items() if number > first_left}
