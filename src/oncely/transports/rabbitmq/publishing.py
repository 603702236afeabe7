"""Publishing with confirms: many messages are on their way at once, and each is accounted for."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pika import BasicProperties, spec

from oncely.transports.rabbitmq.connection import Channel, Line, Reply
from oncely.transports.rabbitmq.messages import Content

NOT_STORED = "the broker has not stored it"
_WINDOW = 1_000
"""So many messages are sent before the first is confirmed."""


class _Window:
    """Messages for one queue that are on their way together."""

    def __init__(self, queue: str, contents: Sequence[Content], done: Reply) -> None:
        self.queue = queue
        self.contents = contents
        self.done = done
        self.unconfirmed = len(contents)
        self.refused: dict[int, str] = {}

    def is_returned(self, place: int, properties: BasicProperties, body: bytes) -> bool:
        sent = self.contents[place]
        return sent.body == body and sent.properties.message_id == properties.message_id


class Publisher(Channel):
    """A channel on which the broker confirms what it has stored."""

    def __init__(self, line: Line) -> None:
        self._numbers = 0
        self._unconfirmed: dict[int, tuple[_Window, int]] = {}
        super().__init__(line)
        self.ask(self._confirm)

    def publish(self, queue: str, contents: Sequence[Content]) -> Mapping[int, str]:
        """Put messages into a queue; which of them the broker has refused, by place, and why.

        Raises TransportError when it has not said so of all; for each so many it has the line's
        time.
        """
        refused = {}
        for first in range(0, len(contents), _WINDOW):
            send = partial(self._send, queue, contents[first : first + _WINDOW])
            by_place = self.ask(send)
            refused.update({first + place: reason for place, reason in by_place.items()})
        return refused

    def _confirm(self, reply: Reply) -> None:
        self.raw.add_on_return_callback(self._on_return)
        self.raw.confirm_delivery(self._on_confirm, callback=reply)

    def _send(self, queue: str, contents: Sequence[Content], done: Reply) -> None:
        window = _Window(queue, contents, done)
        for place, content in enumerate(window.contents):
            self._numbers += 1
            self._unconfirmed[self._numbers] = window, place
            self.raw.basic_publish(
                "", window.queue, content.body, content.properties, mandatory=True
            )

    def _on_return(
        self, _: object, returned: spec.Basic.Return, properties: BasicProperties, body: bytes
    ) -> None:
        # It does not say which; one that is equal to it in all that counts is as good.
        for window, place in self._unconfirmed.values():
            is_open = window.queue == returned.routing_key and place not in window.refused
            if is_open and window.is_returned(place, properties, body):
                window.refused[place] = f"no queue takes it: {returned.reply_text}"
                return

    def _on_confirm(self, told: Any) -> None:
        is_stored = isinstance(told.method, spec.Basic.Ack)
        for number in self._confirmed(told.method.delivery_tag, multiple=told.method.multiple):
            window, place = self._unconfirmed.pop(number)
            if not is_stored:
                window.refused[place] = NOT_STORED
            window.unconfirmed -= 1
            if not window.unconfirmed:
                window.done(window.refused)

    def _confirmed(self, last: int, *, multiple: bool) -> list[int]:
        if not multiple:
            return [last]
        numbers = []
        for number in self._unconfirmed:
            if number > last:
                break
            numbers.append(number)
        return numbers
