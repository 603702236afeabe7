"""Streams of NATS JetStream as sources."""

import json
from asyncio import Queue, Runner, gather
from collections.abc import Coroutine, Sequence
from typing import Any

import nats
from nats.aio.client import Client

from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.sources.messages import nats_message, transport_errors

_PLAIN: Any = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0.1}


class JetStreamSource:
    """A stream, or STREAM/CONSUMER: a durable pull consumer of it, made where it is missing."""

    def __init__(self, url: str, queue: str) -> None:
        self._stream, self._consumer = f"{queue}/oncely".split("/")[:2]
        self._url, self._runner, self._client, self._batch = url, Runner(), Client(), list[Any]()

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        self._batch = self._run(self._pull(max_messages, max(wait_s, 0.1)))
        return [nats_message(each) for each in self._batch]

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
        with transport_errors(nats.errors.Error, OSError):
            return self._runner.run(work)

    async def _info(self) -> Any:
        if not self._client.is_connected:
            # Its own words are not logged: the call that fails raises them.
            self._client = await nats.connect(self._url, error_cb=Queue().put, **_PLAIN)
            await self._client.jetstream().pull_subscribe("", self._consumer, self._stream)
        info = await self._client.jetstream().consumer_info(self._stream, self._consumer)
        if info.config.deliver_subject or info.config.ack_policy != "explicit":
            raise ConfigError(f"source: {self._consumer!r} does not pull and acknowledge messages")
        return info

    async def _pull(self, most: int, wait_s: float) -> list[Any]:
        info, found = await self._info(), list[Any]()
        count = min(most, info.num_pending or info.num_ack_pending or 1)
        request = json.dumps({"batch": count, "expires": int(wait_s * 1e9)}).encode()
        at = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}"
        inbox = await self._client.subscribe(self._client.new_inbox(), pending_bytes_limit=0)
        await self._client.publish(at, request, inbox.subject)
        # Only a message has a reply subject. `fetch` would fail at one with a header "Status".
        while len(found) < count and (each := await inbox.next_msg(wait_s + 10)).reply:
            found.append(each)
        await inbox.unsubscribe()
        return found

    async def _acknowledge(self) -> None:
        await gather(*(each.ack_sync(10) for each in self._batch))
