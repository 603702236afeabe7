"""Messages that wait in a ledger: to be sent, to be tried again, for people, for a consumer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from uuid import uuid4

from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.core.record import Key

MAX_QUEUE_LENGTH = 240
"""Characters, of a queue in a ledger. The column of the table has room for them."""

OUTBOX = "send"
"""The queue of messages to be sent; a relay takes them."""
_BATCH = 24
"""Letters of a name that say with which others it was put in; the rest are its place."""
_RETRIES = "retry/"
_QUEUES = "queue/"


def retries_of(consumer: str) -> str:
    """The queue of what a consumer tries again, and of its dead letters, which are set aside."""
    return f"{_RETRIES}{consumer}"


def queue_named(name: str) -> str:
    """The queue of that name, into which programs put messages. Raises MessageError for one that
    is too long.
    """
    if len(name) > MAX_QUEUE_LENGTH:
        raise MessageError(f"queue: a name of {len(name)} characters is over {MAX_QUEUE_LENGTH}")
    return f"{_QUEUES}{name}"


def name_of(queue: str) -> str:
    """The name of a queue into which programs put messages."""
    return queue.removeprefix(_QUEUES)


def consumer_of(queue: str) -> str | None:
    """Whose retries wait in a queue; None where it is another's."""
    return queue.removeprefix(_RETRIES) if queue.startswith(_RETRIES) else None


def name_of_queue(queue: str) -> str | None:
    """By which programs know it; None where they put nothing there."""
    return queue.removeprefix(_QUEUES) if queue.startswith(_QUEUES) else None


def retry_name(queue: str) -> str:
    """What tells the message that is tried again from others of its key: there is one at most."""
    return digest(queue)


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """One message in one queue of a ledger; what goes to two destinations waits twice.

    Told from others by `parent` and `name`.
    """

    id: str
    destination: str
    """Where it is to be sent; empty for what is not."""
    message: Message
    parent: Key
    """The message that it belongs to: the one in whose processing it was sent, or itself."""
    position: int = 0
    """Its place in the order of sending, among those of its parent."""
    delay_s: float = 0.0
    """It is not taken sooner than so many seconds after it was kept."""
    attempts: int = 0
    """How often it was tried, or a transport has refused it."""
    error: str | None = None
    """Why it failed last, or was refused."""
    number: int | None = None
    """Its place among all that the store holds; None before it is stored."""
    queue: str = OUTBOX
    reason: str | None = None
    """Why it is set aside, where it is."""
    is_set_aside: bool = False
    """Whether it waits for people: nobody takes it, and nothing waits behind it."""
    name: str = ""
    lane: str = ""
    """Messages of one lane are taken in their order; one lane does not wait for another.

    Those to be sent to one destination with one ordering key; without a key, those of one parent.
    One with a delay is a lane of its own: nothing is to wait for a time that is to come.
    """
    since: float | None = field(default=None, compare=False)
    """When it was kept first, by the store's clock, as are the others."""
    last_seen: float | None = field(default=None, compare=False)
    """When it was kept or put back last."""
    due: float | None = field(default=None, compare=False)
    """When it can be taken, unless it is held."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", digest(self.id, self.destination))
        if not self.lane:
            object.__setattr__(self, "lane", self._lane())

    def _lane(self) -> str:
        if self.delay_s:
            return digest(self.destination, *self.parent, self.id)
        key = self.message.key
        parts = [*self.parent] if key is None else [key]
        return digest(self.destination, *parts)

    @classmethod
    def unparented(
        cls, destination: str, message: Message, name: str, delay_s: float = 0.0
    ) -> Self:
        """A message to be sent that belongs to no other: one more under each name."""
        lane = "" if message.key is not None and not delay_s else name
        parent = Key("", message.id)
        return cls(message.id, destination, message, parent, delay_s=delay_s, name=name, lane=lane)

    @classmethod
    def queued(
        cls, queue: str, messages: Sequence[Message], names: Sequence[str] | None = None
    ) -> list[Self]:
        """What is put into the queue of that name: one more each, whatever their ids. Of those with
        one ordering key the next waits until the one before is done with.
        """
        into, names = queue_named(queue), names or names_for(len(messages))
        # They belong to no message, and are not looked for by one.
        return [
            cls(
                id=message.id,
                destination="",
                message=message,
                parent=Key("", ""),
                queue=into,
                name=name,
                lane=name if message.key is None else lane_in(into, message.key),
            )
            for name, message in zip(names, messages, strict=True)
        ]

    def moved(self, queue: str) -> Self:
        """The same as it stands in another queue."""
        into, key = queue_named(queue), self.message.key
        return replace(self, queue=into, lane=self.name if key is None else lane_in(into, key))

    @property
    def key(self) -> Key:
        """What the ledger knows it by, of one that is tried again or set aside."""
        return self.parent


@dataclass(slots=True, eq=False)
class QueuedRow:
    """A message as it was taken from a queue in a store, for whoever is to end it there."""

    row: WaitingMessage
    place: object
    """As `Store.place` has it."""
    is_over: bool = False
    """Whether it was removed with the end of its record."""


DeferredMessage = WaitingMessage
"""What a handler has sent, by the name that it has there."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was set aside by a consumer, for people."""

    id: int
    """By which it is found again."""
    key: Key
    """The consumer, and the message's id; empty for what has none."""
    message: Message
    """As it came."""
    reason: str
    error: str | None
    """With its traceback, where there is one; passwords are masked."""
    attempts: int
    first_seen: float
    """Seconds since 1970 by the store's clock."""
    last_seen: float

    @classmethod
    def of(cls, row: WaitingMessage) -> Self:
        """The dead letter that waits so."""
        return cls(
            row.number or 0,
            Key(consumer_of(row.queue) or row.parent.consumer, row.parent.message_id),
            row.message,
            row.reason or "unknown",
            row.error,
            row.attempts,
            row.since or 0.0,
            row.last_seen or 0.0,
        )


def names_for(count: int) -> list[str]:
    """Names for so many messages that nothing else has, near to each other in their order."""
    batch = uuid4().hex[:_BATCH]
    return [f"{batch}{place:0{32 - _BATCH}x}" for place in range(count)]


def lane_in(queue: str, key: str) -> str:
    """That of the messages of one ordering key in a queue."""
    return digest(queue, "key", key)


def deferred_id(parent: Key, position: int) -> str:
    """The id of what is sent at that place: the same whenever the handler runs again."""
    return digest(*parent, str(position))


def digest(*parts: str) -> str:
    """A name of 32 hexadecimal digits for texts in their order, whatever is in them."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
