"""Publishing with confirms: many messages are on their way at once, and each is accounted for."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pika import BasicProperties, spec

from oncely.transports.rabbitmq.connection import Channel, Line
from oncely.transports.rabbitmq.messages import Content

NOT_STORED = "the broker has not stored it"
_WINDOW = 1_000
"""How many messages may be unconfirmed."""


class _Batch:
    """Messages for one queue that are published together."""

    def __init__(
        self, queue: str, contents: Sequence[Content], done: "Future[Mapping[int, str]]"
    ) -> None:
        self.queue = queue
        self.contents = contents
        self.done = done
        self.next = 0
        self.unconfirmed = len(contents)
        self.refused: dict[int, str] = {}

    def is_returned(self, place: int, properties: BasicProperties, body: bytes) -> bool:
        sent = self.contents[place]
        return sent.body == body and sent.properties.message_id == properties.message_id


class Publisher(Channel):
    """A channel on which the broker confirms what it has stored."""

    def __init__(self, line: Line) -> None:
        self._numbers = 0
        self._unconfirmed: dict[int, tuple[_Batch, int]] = {}
        self._waiting: list[_Batch] = []
        super().__init__(line)
        self.ask(self._confirm)

    def publish(
        self, queue: str, contents: Sequence[Content], timeout_s: float
    ) -> Mapping[int, str]:
        """Put messages into a queue; which of them the broker has refused, by place, and why.

        Raises TransportError when it has not said so of all in time.
        """

        def begin(done: "Future[Mapping[int, str]]") -> None:
            if self.error is not None:
                raise self.error
            self._waiting.append(_Batch(queue, contents, done))
            self._asked.add(done)
            done.add_done_callback(self._asked.discard)
            self._go_on()

        return self.line.ask(begin, timeout_s)

    def _confirm(self, reply: Any) -> None:
        self.raw.add_on_return_callback(self._on_return)
        self.raw.confirm_delivery(self._on_confirm, callback=reply)

    def _go_on(self) -> None:
        """Send as much as there is room for."""
        while self._waiting and len(self._unconfirmed) < _WINDOW:
            batch = self._waiting[0]
            self._send(batch, batch.next)
            batch.next += 1
            if batch.next == len(batch.contents):
                del self._waiting[0]

    def _send(self, batch: _Batch, place: int) -> None:
        self._numbers += 1
        self._unconfirmed[self._numbers] = batch, place
        content = batch.contents[place]
        self.raw.basic_publish("", batch.queue, content.body, content.properties, mandatory=True)

    def _on_return(
        self, _: object, returned: spec.Basic.Return, properties: BasicProperties, body: bytes
    ) -> None:
        # It does not say which; one that is equal to it in all that counts is as good.
        for batch, place in self._unconfirmed.values():
            is_open = batch.queue == returned.routing_key and place not in batch.refused
            if is_open and batch.is_returned(place, properties, body):
                batch.refused[place] = f"no queue takes it: {returned.reply_text}"
                return

    def _on_confirm(self, told: Any) -> None:
        is_stored = isinstance(told.method, spec.Basic.Ack)
        for number in self._confirmed(told.method.delivery_tag, multiple=told.method.multiple):
            batch, place = self._unconfirmed.pop(number)
            if not is_stored:
                batch.refused[place] = NOT_STORED
            batch.unconfirmed -= 1
            if not batch.unconfirmed and not batch.done.done():
                batch.done.set_result(batch.refused)
        self._go_on()

    def _confirmed(self, last: int, *, multiple: bool) -> list[int]:
        if not multiple:
            return [last]
        numbers = []
        for number in self._unconfirmed:
            if number > last:
                break
            numbers.append(number)
        return numbers
