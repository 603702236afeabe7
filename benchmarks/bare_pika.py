"""Loops of the driver alone: they take messages out of a queue of RabbitMQ without any library."""

from collections.abc import Callable
from typing import Any

import pika

PREFETCH = 400


def take(
    url: str,
    queue: str,
    count: int,
    handle: Callable[[str], object] | None = None,
    together: int = 1,
) -> None:
    """Take so many messages, pass their ids to `handle`, acknowledge so many at a time."""
    loop = _Loop(queue, count, handle, together)
    connection = pika.SelectConnection(pika.URLParameters(url), on_open_callback=loop.opened)
    connection.ioloop.start()


class _Loop:
    def __init__(
        self, queue: str, count: int, handle: Callable[[str], object] | None, together: int
    ) -> None:
        self._queue = queue
        self._left = count
        self._handle = handle
        self._together = together

    def opened(self, connection: Any) -> None:
        self._connection = connection
        connection.channel(on_open_callback=self._channel_opened)

    def _channel_opened(self, channel: Any) -> None:
        channel.basic_qos(prefetch_count=PREFETCH, callback=lambda _: self._consume(channel))

    def _consume(self, channel: Any) -> None:
        channel.basic_consume(self._queue, self._delivered)

    def _delivered(self, channel: Any, method: Any, properties: Any, _: bytes) -> None:
        if self._handle is not None:
            self._handle(properties.message_id)
        self._left -= 1
        if self._left % self._together == 0 or not self._left:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if not self._left:
            self._connection.add_on_close_callback(lambda *_: self._connection.ioloop.stop())
            self._connection.close()
