"""Taking messages out of a queue one by one, to look at them or to take some of them away."""

from collections.abc import Iterator, Sequence
from typing import Any

from pika import spec

from oncely.transports.rabbitmq.connection import Channel, ChannelLost, Line, Reply
from oncely.transports.rabbitmq.messages import Content

_NOT_FOUND = 404


class Browser(Channel):
    """A channel that has taken messages; what is not acknowledged goes back when it is closed."""

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self._reply: Reply
        self.raw.add_callback(
            lambda _: self._reply(None), replies=[spec.Basic.GetEmpty], one_shot=False
        )

    def messages(self, queue: str) -> Iterator[tuple[int, Content]]:
        """One after the other, with the number by which it is acknowledged; none where there is
        no such queue.
        """
        try:
            while got := self.ask(lambda reply: self._get(queue, reply)):
                yield got
        except ChannelLost as lost:
            if lost.code != _NOT_FOUND:
                raise

    def acknowledge(self, numbers: Sequence[int]) -> None:
        """Take them out of the queue for good."""

        def start(reply: Reply) -> None:
            for number in numbers:
                self.raw.basic_ack(number)
            self.line.when_written(lambda: reply(None))

        self.ask(start)

    def close(self) -> None:
        if self.error is None:
            self.ask(self._give_back)
        super().close()

    def _get(self, queue: str, reply: Reply) -> None:
        def on_got(_: object, got: spec.Basic.GetOk, properties: Any, body: bytes) -> None:
            reply((got.delivery_tag, Content(properties, body)))

        self._reply = reply
        self.raw.basic_get(queue, on_got)

    def _give_back(self, reply: Reply) -> None:
        # Told so, the broker puts them back before it answers; where a channel is closed, later.
        self.raw.basic_nack(0, multiple=True, requeue=True)
        self.line.when_written(lambda: reply(None))
