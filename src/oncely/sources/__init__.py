"""Sources: the least that a broker has to be. It gives messages, and is told when they are stored.

`oncely.bridge` moves the messages of a source into a ledger or into files.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, cast

from oncely.core.errors import ConfigError, storable
from oncely.core.message import Message
from oncely.core.verdicts import Ack
from oncely.stores.open_store import extra_installed
from oncely.transports.open_transport import open_transport
from oncely.transports.plugins import SOURCES, opened_by
from oncely.transports.transport import Delivery, Transport

_EXTRAS = {"nats": "nats", "tls": "nats", "redis": "redis", "rediss": "redis", "sqs": "sqs"}
"""The extras that install the drivers, by the schemes of URLs."""


class Source(Protocol):
    """One queue, topic or stream of a broker. Raises TransportError if the broker fails or cannot
    be reached, and is called again then.

    A source with a method `is_drained() -> bool` tells whether nothing is left to receive; any
    other one is drained when nothing is received.
    """

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        """The next messages, at most `max_messages`; waits at most `wait_s` for the first.

        A message that cannot be read is one, too: see `without_id`.
        """

    def acknowledge(self) -> None:
        """All of the last batch are stored. A batch that was never acknowledged is received again,
        at the latest when the source is opened again.
        """

    def close(self) -> None:
        """Close the connection."""


def open_source(url: str, queue: str) -> Source:
    """The source of a queue at a URL: of every transport, and of what this package and others add
    by the entry points `oncely.sources`. Raises ConfigError, which says what to type instead.
    """
    kind = url.partition("://")[0]
    try:
        with extra_installed(_EXTRAS.get(kind), "source"):
            other = opened_by(SOURCES, url, queue)
    except (TypeError, ValueError):
        if kind not in _EXTRAS:
            raise
        # Not shown: of what cannot be parsed, nobody knows where the password is.
        raise ConfigError(
            f"source: this is not a URL of {kind}; see docs/how-to/bridge.md"
        ) from None
    return TransportSource(open_transport(url), queue) if other is None else cast(Source, other)


class TransportSource:
    """A queue of a transport as a Source. Closes the transport."""

    def __init__(self, transport: Transport, queue: str) -> None:
        self._transport = transport
        self._queue = queue
        self._batch: Sequence[Delivery] = ()

    def receive(self, max_messages: int, wait_s: float) -> Sequence[Message]:
        self._batch = self._transport.receive(self._queue, max_messages, wait_s)
        return [
            each.message if each.problem is None else without_id(each.message, each.problem)
            for each in self._batch
        ]

    def acknowledge(self) -> None:
        self._transport.acknowledge([(delivery, Ack()) for delivery in self._batch])

    def is_drained(self) -> bool:
        return self._transport.is_drained(self._queue)

    def close(self) -> None:
        self._transport.close()


def without_id(message: Message, reason: str) -> Message:
    """A message that must not be handled under its id, as every ledger can hold it: what reads it
    finds no id, and decides by its policy. Headers have the reason, and the id if there was one.
    """
    told = {"oncely-id": message.id} if message.id else {}
    return replace(
        message,
        id="",
        type=storable(message.type),
        source=storable(message.source),
        content_type=storable(message.content_type),
        key=message.key and storable(message.key),
        headers={**message.headers, **told, "oncely-reason": reason},
    )
