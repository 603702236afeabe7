"""Publisher with confirms: many messages are in flight at once, and each is accounted for."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any, NamedTuple

from pika import spec
from pika.connection import Parameters

from oncely.core.errors import TransportError
from oncely.transports.rabbitmq.connection import Channel, ChannelLost, Line, Reach, Reply
from oncely.transports.rabbitmq.messages import Content
from oncely.transports.rabbitmq.properties import decode_properties
from oncely.transports.rabbitmq.topology import WrongQueueType, check_exchange, make_queue

NOT_STORED = "the broker has not stored it: the queue is full, or not available"
_NO_ROUTE = "no queue takes it"
_REFUSALS = (403, 404)
_TOO_LARGE = 406
_DEFAULT = "amq.default"
"""The broker's word for the exchange without a name."""
_MOST_CHANNELS = 10
_WINDOW = 1_000
"""The number of messages sent before the first is confirmed."""
_PAUSES_S = (0.05, 0.1, 0.2)
"""The pauses before messages that were not stored are published again: a quorum queue accepts
nothing for a moment while it starts, or has no leader."""
_AROUND_PROPERTIES_BYTES = 64
"""The size of the frame that must hold the properties: a larger one ends the connection."""

Refused = Mapping[int, str]
"""Why the broker refused messages, by their places."""


class Route(NamedTuple):
    """The destination of messages."""

    exchange: str
    key: str
    queue: str | None = None
    """The queue to create if it is missing."""


class Publisher:
    """Publishes over one channel, and over a new one when that is lost."""

    def __init__(self, parameters: Parameters, confirm_s: float, queue_type: str) -> None:
        self._reach = Reach(parameters, confirm_s)
        self._queue_type = queue_type
        self._lock = Lock()
        self._publisher: _ConfirmChannel | None = None

    def publish(self, route: Route, contents: Sequence[Content]) -> Refused:
        """Publish; return the refused messages when all others are stored. Raises TransportError
        if the broker does not answer for all of them in time.
        """
        refused: dict[int, str] = {}
        left = list(range(len(contents)))
        for pause_s in (0.0, *_PAUSES_S):
            time.sleep(pause_s)
            told = self._publish(route, [contents[index] for index in left])
            refused = {index: refused[index] for index in refused if index not in left}
            refused |= {left[n]: reason for n, reason in told.items()}
            # A queue of ours may have been deleted since it was created.
            passing = (NOT_STORED,) if route.queue is None else (NOT_STORED, _NO_ROUTE)
            left = [index for index, reason in refused.items() if reason in passing]
            if not left:
                break
        return refused

    def close(self) -> None:
        """Close the connection; threads that are publishing get TransportError."""
        self._reach.close()

    def _publish(self, route: Route, contents: Sequence[Content]) -> Refused:
        for _ in range(_MOST_CHANNELS):
            with self._lock:
                line = self._reach.line()
                if self._publisher is None or self._publisher.is_over:
                    self._publisher = _ConfirmChannel(line)
                publisher = self._publisher
            try:
                publisher.prepare(route, self._queue_type)
                return publisher.publish(route, contents)
            except ChannelLost as lost:
                if lost.code == _TOO_LARGE:
                    if len(contents) > 1:
                        each_told = (self._publish(route, [each]) for each in contents)
                        return {index: told[0] for index, told in enumerate(each_told) if told}
                    if f" {len(contents[0].body)} " in lost.text:
                        return {0: lost.text}
                elif lost.code not in _REFUSALS:
                    raise
                is_ours = f"exchange '{route.exchange or _DEFAULT}'" in lost.text
                if lost is not publisher.error or is_ours:
                    return dict.fromkeys(range(len(contents)), lost.text)
                # The channel was closed for another destination, of another thread.
        raise TransportError("RabbitMQ: others' refused messages have closed the channel too often")


class _Window:
    """Messages for one destination that are in flight together."""

    def __init__(self, route: Route, contents: Sequence[Content], done: Reply) -> None:
        self.route = route
        self.contents = contents
        self.done = done
        self.unconfirmed = len(contents)
        self.refused: dict[int, str] = {}


class _ConfirmChannel(Channel):
    """A channel in confirm mode."""

    def __init__(self, line: Line) -> None:
        self.prepared: set[Route] = set()
        """The queues and exchanges that are known to exist."""
        self._numbers = 0
        self._unconfirmed: dict[int, tuple[_Window, int]] = {}
        super().__init__(line)
        self.raw.add_on_return_callback(self._on_return)
        self.call(self.raw.confirm_delivery, self._on_confirm)

    def prepare(self, route: Route, queue_type: str) -> None:
        """Make sure that the queue or the exchange exists: publishing to a missing one would close
        the channel. Raises ChannelLost if it does not exist.
        """
        known = route._replace(key="") if route.exchange else route
        if known in self.prepared:
            return
        if route.exchange:
            check_exchange(self.line, route.exchange)
        elif route.queue is not None:
            # The type of a queue that exists does not matter here.
            with suppress(WrongQueueType):
                make_queue(self.line, route.queue, queue_type)
        self.prepared.add(known)

    def publish(self, route: Route, contents: Sequence[Content]) -> dict[int, str]:
        """Publish; return the refused messages.

        Raises TransportError if the broker has not answered for all; it has the line's time for
        each window.
        """
        most = self.line.connection.params.frame_max - _AROUND_PROPERTIES_BYTES
        refused = {
            index: f"properties of {content.properties.size} bytes are over the limit of {most}"
            for index, content in enumerate(contents)
            if content.properties.size > most
        }
        indexes = [index for index in range(len(contents)) if index not in refused]
        for first in range(0, len(indexes), _WINDOW):
            window = indexes[first : first + _WINDOW]
            by_index = self.ask(partial(self._send, route, [contents[n] for n in window]))
            refused |= {window[n]: reason for n, reason in by_index.items()}
        return refused

    def _send(self, route: Route, contents: Sequence[Content], done: Reply) -> None:
        window = _Window(route, contents, done)
        for index, (properties, body) in enumerate(contents):
            self._numbers += 1
            self._unconfirmed[self._numbers] = window, index
            self.raw.basic_publish(route.exchange, route.key, body, properties, mandatory=True)

    def _on_return(self, _: object, returned: spec.Basic.Return, __: object, body: bytes) -> None:
        # The broker does not say which message; an equal one will do.
        raw = self.line.wire.properties.pop(self.raw.channel_number)
        message_id = decode_properties(raw)[0].get("message_id")
        route = (returned.exchange, returned.routing_key)
        for window, index in self._unconfirmed.values():
            sent = window.contents[index]
            is_equal = sent.body == body and sent.properties.message_id == message_id
            if is_equal and window.route[:2] == route and index not in window.refused:
                window.refused[index] = _NO_ROUTE
                self.prepared.discard(window.route)
                return

    def _on_confirm(self, told: Any) -> None:
        is_stored, last = isinstance(told.method, spec.Basic.Ack), told.method.delivery_tag
        confirmed = [last]
        if told.method.multiple:
            confirmed = [*takewhile(lambda number: number <= last, self._unconfirmed)]
        for number in confirmed:
            window, index = self._unconfirmed.pop(number)
            if not is_stored:
                window.refused[index] = NOT_STORED
            window.unconfirmed -= 1
            if not window.unconfirmed:
                window.done(window.refused)
