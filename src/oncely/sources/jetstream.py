"""Streams of NATS JetStream as sources."""

import json
from asyncio import Runner, gather
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import nats
from nats.aio.client import Client
from nats.errors import Error, TimeoutError  # noqa: A004
from nats.js.errors import NotFoundError

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.sources.reading import read_message, transport_errors

_OPTIONS: Any = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0.1}


class JetStreamSource:
    """A stream, or STREAM/CONSUMER: a durable pull consumer of it, made where it is missing."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._runner, self._client = url, Runner(), Client()
        self._stream, self._consumer = f"{queue}/oncely".split("/")[:2]
        self._batch: list[Any] = []

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        self._batch = self._run(self._pull(max_messages, max(wait_s, 0.1)))
        return [_message(each) for each in self._batch]

    def acknowledge(self) -> None:
        self._run(self._acknowledge())

    def is_drained(self) -> bool:
        info = self._run(self._info())
        return not (info.num_pending or info.num_ack_pending)

    def close(self) -> None:
        if self._client.is_connected:
            self._run(self._client.close())
        self._runner.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        with transport_errors(Error, OSError):
            return self._runner.run(work)

    async def _info(self) -> Any:
        if not self._client.is_connected:
            self._client = await nats.connect(self._url, error_cb=_ignore, **_OPTIONS)
        stream = self._client.jetstream()
        try:
            info = await stream.consumer_info(self._stream, self._consumer)
        except NotFoundError:
            info = await stream.add_consumer(self._stream, durable_name=self._consumer)
        if info.config.deliver_subject or info.config.ack_policy != "explicit":
            raise ConfigError(f"source: {self._consumer!r} does not pull and acknowledge messages")
        return info

    async def _pull(self, most: int, wait_s: float) -> list[Any]:
        info, found = await self._info(), list[Any]()
        count = min(most, info.num_pending or info.num_ack_pending or 1)
        inbox = await self._client.subscribe(self._client.new_inbox(), pending_bytes_limit=0)
        request = json.dumps({"batch": count, "expires": int(wait_s * 1e9)}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        await self._client.publish(subject, request, inbox.subject)
        # Only a message has a reply subject. `fetch` would fail at one with a header "Status".
        with suppress(TimeoutError):
            while len(found) < count and (each := await inbox.next_msg(wait_s + 1)).reply:
                found.append(each)
        await inbox.unsubscribe()
        return found

    async def _acknowledge(self) -> None:
        await gather(*(each.ack_sync(10) for each in self._batch))


async def _ignore(_: Exception) -> None:
    """The call that fails raises it."""


def _message(raw: Any) -> Message:
    at, headers = raw.metadata, {"type": raw.subject, **(raw.headers or {})}
    # A stream that is made again has the same numbers.
    own_id = f"{at.stream}:{at.sequence.stream}:{at.timestamp.isoformat()}"
    return read_message(headers.pop("Nats-Msg-Id", own_id), raw.data, headers, at.timestamp)
