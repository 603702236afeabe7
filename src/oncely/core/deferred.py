"""DeferredMessage: a message sent inside a handler, held until the handler has succeeded."""

import hashlib
import json
from dataclasses import dataclass

from oncely.core.message import Message
from oncely.core.record import Key

MAX_DESTINATION_LENGTH = 255
"""Characters. The column of the table is as wide."""


@dataclass(frozen=True, slots=True)
class DeferredMessage:
    """One message for one destination; a message for two destinations is deferred twice.

    Told from others by the message being processed, its own id and the destination.
    """

    id: str
    destination: str
    message: Message
    parent: Key
    """The message during whose processing it was sent, and the consumer."""
    position: int = 0
    """Its place in the order of sending, among those of its parent."""
    delay_s: float = 0.0
    """It is not sent sooner than so many seconds after its parent was handled."""
    attempts: int = 0
    """How often a transport refused it."""
    error: str | None = None
    """Why it was refused last."""
    number: int | None = None
    """Its place among all that the store holds; None before it is stored."""

    @property
    def name(self) -> tuple[Key, str, str]:
        """What tells it from all others."""
        return self.parent, self.id, self.destination

    @property
    def lane(self) -> str:
        """Messages of one lane are sent in their order, one lane does not wait for another.

        Those for one destination with one ordering key; without a key, those of one parent. One
        with a delay is a lane of its own: nothing is to wait for a time that is to come.
        """
        if self.delay_s:
            return digest(self.destination, *self.parent, self.id)
        key = self.message.key
        parts = [*self.parent] if key is None else [key]
        return digest(self.destination, *parts)


def deferred_id(parent: Key, position: int) -> str:
    """The id of what is sent at that place: the same whenever the handler runs again."""
    return digest(*parent, str(position))


def digest(*parts: str) -> str:
    """A name of 32 hexadecimal digits for texts in their order, whatever is in them."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
