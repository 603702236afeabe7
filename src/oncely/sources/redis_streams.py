"""Streams of Redis as sources, read by a consumer group."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis import ConnectionPool, Redis, RedisError, ResponseError
from redis.connection import parse_url

from oncely.core.durations import positive_seconds
from oncely.core.message import Message
from oncely.sources.messages import redis_message, transport_errors

_HARM = 'receive each message again and again; write "60s"'
_OURS: Any = {"decode_responses": False, "protocol": 2, "socket_timeout": 10.0}


class RedisStreamSource:
    """A stream that the URL's `group` reads. All bridges are one consumer in it, so that dead ones
    leave no names; what was not acknowledged within the URL's `visibility` is received again.
    """

    def __init__(self, url: str, queue: str) -> None:
        settings: Any = parse_url(url)  # type: ignore[no-untyped-call]
        self._at = queue, settings.pop("group", "oncely")
        idle_s = positive_seconds(settings.pop("visibility", "60s"), "visibility", _HARM)
        pool = ConnectionPool(**(settings | _OURS))
        pool.connection_class(**pool.connection_kwargs)  # Only to check the settings.
        self._redis: Any = Redis(connection_pool=pool)
        self._idle_ms, self._batch = int(idle_s * 1_000), list[bytes]()

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        ours, wait_ms = (*self._at, "oncely"), max(1, int(min(wait_s, 5) * 1_000))
        with transport_errors(RedisError):
            with suppress(ResponseError):  # It exists.
                self._redis.xgroup_create(*self._at, "0", mkstream=True)
            _, found, *_ = self._redis.xautoclaim(*ours, self._idle_ms, count=max_messages)
            if not found:
                after = {self._at[0]: ">"}
                streams = self._redis.xreadgroup(*ours[1:], after, max_messages, wait_ms)
                found = streams[0][1] if streams else []
        self._batch = [entry_id for entry_id, _ in found]
        return [redis_message(self._at[0], entry_id.decode(), raw) for entry_id, raw in found]

    def acknowledge(self) -> None:
        with transport_errors(RedisError):
            self._redis.xack(*self._at, *self._batch)

    def is_drained(self) -> bool:
        with transport_errors(RedisError):
            return not self._redis.xpending(*self._at)["pending"]

    def close(self) -> None:
        self._redis.connection_pool.disconnect()
