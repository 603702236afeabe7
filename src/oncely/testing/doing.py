"""What tests of transactions need: deferred messages, and one thing done inside at a time."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from oncely.core.deferred import DeferredMessage
from oncely.core.message import Message
from oncely.core.record import Key, Record
from oncely.ledger import Ledger
from oncely.stores.base import Refusal, Store


def key_of(message_id: str) -> Key:
    """A key of the consumer that these tests speak of."""
    return Key("billing", message_id)


PARENT = key_of("parent")


def deferred(
    message_id: str,
    destination: str = "mail",
    *,
    key: str | None = None,
    body: bytes = b"{}",
    parent: Key = PARENT,
    position: int = 0,
    delay_s: float = 0.0,
) -> DeferredMessage:
    """A message as it is deferred."""
    message = Message(message_id, body, key=key)
    return DeferredMessage(message_id, destination, message, parent, position, delay_s)


class Doing:
    """Does one thing of Inside, in a transaction of its own."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.ledger = Ledger(store)

    def insert(self, records: Sequence[Record]) -> set[Key]:
        """As Inside says."""
        return self.store.transaction(lambda inside: inside.insert(records))

    def defer(self, messages: Sequence[DeferredMessage]) -> None:
        """As Inside says."""
        self.store.transaction(lambda inside: inside.defer(messages))

    def waiting(self, keys: Collection[Key]) -> Sequence[DeferredMessage]:
        """As Inside says."""
        return self.store.transaction(lambda inside: inside.waiting(keys))

    def take(
        self, limit: int, hold_s: float, parents: Collection[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        """As Inside says."""
        return self.store.transaction(lambda inside: inside.take(limit, hold_s, parents))

    def remove(self, messages: Sequence[DeferredMessage]) -> None:
        """As Inside says."""
        self.store.transaction(lambda inside: inside.remove(messages))

    def put_back(self, refusals: Sequence[Refusal]) -> None:
        """As Inside says."""
        self.store.transaction(lambda inside: inside.put_back(refusals))

    def steps(self, key: Key) -> Mapping[str, Any]:
        """As Inside says."""
        return self.store.transaction(lambda inside: inside.steps(key))

    def keep_step(self, key: Key, name: str, result: Any) -> None:
        """As Inside says."""
        self.store.transaction(lambda inside: inside.keep_step(key, name, result))


def ids_of(messages: Sequence[DeferredMessage]) -> list[str]:
    """Their own ids, in their order."""
    return [message.id for message in messages]
