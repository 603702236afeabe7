"""Messages that wait in a ledger: to be sent, to be tried again, for people, for a consumer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self
from uuid import uuid4

from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.core.record import Key

MAX_QUEUE_LENGTH = 240
"""Characters of the name of a queue in a ledger. The column of the table has room for them."""

OUTBOX = "send"
"""The queue of messages to be sent; a relay takes them."""
_BATCH = 24
"""Leading characters of a name, equal for messages put in together; the rest is the place."""
_RETRIES = "retry/"
_QUEUES = "queue/"


def retries_of(consumer: str) -> str:
    """The queue of a consumer's retries, and of its dead letters, which are set aside."""
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
    """The consumer whose retries wait in a queue; None where it is not a queue of retries."""
    return queue.removeprefix(_RETRIES) if queue.startswith(_RETRIES) else None


def name_of_queue(queue: str) -> str | None:
    """The name by which programs know a queue; None where it is not a queue of theirs."""
    return queue.removeprefix(_QUEUES) if queue.startswith(_QUEUES) else None


def retry_name(queue: str) -> str:
    """The name of a retry in the queue, unique under its key: a key has one retry at most."""
    return digest(queue)


@dataclass(frozen=True, slots=True)
class WaitingMessage:
    """One message in one queue of a ledger; a message for two destinations waits twice.

    Identified by `parent` and `name`.
    """

    id: str
    destination: str
    """Where it is to be sent; empty in a queue of programs and for most retries: the message of a
    framework's own, such as a task of Celery, has the name of the framework."""
    message: Message
    parent: Key
    """The message that it belongs to: the one in whose processing it was sent, or itself."""
    position: int = 0
    """Its place in the order of sending, among those of its parent."""
    delay_s: float = 0.0
    """It is not taken sooner than this many seconds after it was stored."""
    attempts: int = 0
    """How often it was tried, or a transport has refused it."""
    error: str | None = None
    """Why it failed or was refused the last time."""
    number: int | None = None
    """Its place among all that the store holds; None before it is stored."""
    queue: str = OUTBOX
    reason: str | None = None
    """Why it is set aside, where it is."""
    is_set_aside: bool = False
    """Whether it waits for people: no worker takes it, and nothing waits behind it."""
    name: str = ""
    lane: str = ""
    """Messages of one lane are taken in their order; one lane does not wait for another.

    In the outbox, the messages to one destination with one ordering key are a lane; without a key,
    those of one parent. A delayed message has its own lane, so that nothing waits for its time.
    """
    since: float | None = field(default=None, compare=False)
    """When it was first stored, by the store's clock, as are the next two."""
    last_seen: float | None = field(default=None, compare=False)
    """When it was last stored or put back."""
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
        """The messages to put into the queue of that name: each is a new one, whatever its id. Of
        those with one ordering key, each waits until the one before it is done.
        """
        into, names = queue_named(queue), names or names_for(len(messages))
        # They have no parent, and are never looked up by one.
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
        """The same message in another queue."""
        into, key = queue_named(queue), self.message.key
        return replace(self, queue=into, lane=self.name if key is None else lane_in(into, key))

    @property
    def key(self) -> Key:
        """The key of its record, for a retry or a dead letter."""
        return self.parent

    @property
    def is_retry(self) -> bool:
        """Whether it is the retry of its key, or the dead letter that came of that; not another
        message that came under the same id, say.
        """
        return self.name == retry_name(self.queue)

    @property
    def is_taken_here(self) -> bool:
        """Whether it is a retry that a worker takes from the ledger; one with a destination is sent
        to the broker of its framework again.
        """
        return self.is_retry and not self.destination


@dataclass(slots=True, eq=False)
class QueuedRow:
    """A message taken from a queue in a store, for whoever removes it there."""

    row: WaitingMessage
    database_id: object
    """`Store.database_id` of that store."""
    is_over: bool = False
    """Whether it was removed in the commit that ended its record."""


DeferredMessage = WaitingMessage
"""The name of a waiting message that a handler has sent."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was set aside by a consumer, for people."""

    id: int
    """Its number, by which it is found again."""
    key: Key
    """The consumer, and the message's id; empty where it has none."""
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
        """The dead letter in a row."""
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


ERASED = "(erased)"
"""Stands in the audit in the place of the id of a message that was erased."""


class Erased(NamedTuple):
    """How much was kept of a message, and is removed: its record, finished steps, copies that wait
    in a queue or for a retry, dead letters, messages to be sent, its id in entries of the audit.
    """

    records: int = 0
    steps: int = 0
    waiting: int = 0
    dead_letters: int = 0
    unsent: int = 0
    audit: int = 0


def names_for(count: int) -> list[str]:
    """Unique names for `count` messages: in their order, and neighbours in an index."""
    batch = uuid4().hex[:_BATCH]
    return [f"{batch}{index:0{32 - _BATCH}x}" for index in range(count)]


def lane_in(queue: str, key: str) -> str:
    """The lane of the messages of one ordering key in a queue."""
    return digest(queue, "key", key)


def deferred_id(parent: Key, position: int) -> str:
    """The id of the message sent at that position: the same in every run of the handler."""
    return digest(*parent, str(position))


def digest(*parts: str) -> str:
    """A name of 32 hexadecimal digits for a sequence of texts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
