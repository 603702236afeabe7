"""The words of the ledger: key, state, record, claim."""

import hashlib
import json
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, Self

from oncely.core.ids import Id, check_id, check_ids, id_text

_WRITES_BITS = 24
BIRTH_BITS = 39


class State(StrEnum):
    """Where a record stands. The values are what the table's status column holds."""

    PROCESSING = "processing"
    HANDLED = "handled"
    COMPLETED = "sent"
    FAILED = "failed"

    @property
    def word(self) -> str:
        """The word that people read: a record stored as `sent` is completed."""
        return self.name.lower()


class _KeyPair(NamedTuple):
    consumer: str
    message_id: str


class Key(_KeyPair):
    """Identifies a record: two consumers never see each other's records.

    A message id that is an int or a UUID is stored as its text.
    """

    __slots__ = ()

    def __new__(cls, consumer: str, message_id: Id) -> Self:
        """The two as a key, unchecked: `check_key` checks them."""
        text = message_id if type(message_id) is str else id_text(message_id)
        return tuple.__new__(cls, (consumer, text))


def check_key(key: Key) -> Key:
    """Return `key` if both of its halves are usable; raises MessageError as `check_id` does."""
    check_keys([key])
    return key


def check_keys(keys: Collection[Key]) -> None:
    """Raise MessageError as `check_id` does, if half of one of these is not usable."""
    checked: object = keys  # No consumer.
    for key in keys:
        if key.consumer is not checked:
            checked = check_id(key.consumer, "consumer")
    check_ids([key.message_id for key in keys])


def idempotency_key(key: Key, step: str | None = None) -> str:
    """An idempotency key for outside services, by which they recognize a repeated call; each step
    has its own.
    """
    names = [*key] if step is None else [*key, step]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


class Record(NamedTuple):
    """One ledger row. Times are seconds since 1970 by the store's clock."""

    key: Key
    state: State
    attempts: int
    """Handler runs granted so far, including those that never ended: but not those of a worker that
    has died and had claimed the message together with others."""
    fence: int
    """Grows with every granted claim; only the holder of the newest may write."""
    first_seen: float
    last_seen: float
    lease_until: float | None = None
    """When the claim on a record in processing runs out; None for never. For a failed record: when
    its message, which waits in the ledger for its retry, is due; None where it does not wait there.
    """
    metadata: Mapping[str, Any] | None = None
    result: Any = None
    fingerprint: str | None = None
    exhausted: bool = False
    """Failed permanently: claimed again only if an operator lets it run."""
    duplicates: int = 0
    """Duplicate deliveries that were counted since the handler succeeded."""
    version: int = 0
    """Compared by every write. The low 24 bits count writes, starting at any number. The high bits
    are the birth: the token with which the newest claim was asked for, or another number after a
    release. So a claim from before a release, a purge or a forget is never taken for a later one,
    and an asker whose answer was lost is given the same claim again."""
    worker: int | None = None
    """The number of the process that holds the claim; None where that is not known."""

    @property
    def error(self) -> str | None:
        """Why the last attempt failed."""
        error = self.metadata.get("error") if self.metadata else None
        # A service that shares the table may have kept something other than text.
        return error if error is None or isinstance(error, str) else repr(error)

    @property
    def is_handled(self) -> bool:
        """Whether the handler has succeeded; messages of its may wait to be sent."""
        return self.state in (State.HANDLED, State.COMPLETED)

    @property
    def waits_for_sender(self) -> bool:
        """Whether an operator has allowed it to run again, it has not run since, and no consumer
        takes its message from the ledger: whoever sent it has to send it again.
        """
        is_allowed = self.state is State.FAILED and not self.attempts and not self.exhausted
        return is_allowed and self.lease_until is None

    @property
    def birth(self) -> int:
        """Distinguishes this claim, or this record, from an earlier one under the same key."""
        return self.version >> _WRITES_BITS


class Claim(NamedTuple):
    """The right to process a message now, as it was granted."""

    key: Key
    """The consumer and message id that the claim is for."""
    fence: int
    """Hand it to outside services that can refuse an older one."""
    version: int
    """The version of the record as the claim wrote it, or as it was written under the claim."""
    attempts: int
    """Handler runs granted so far, this one included."""
    former: Record | None = None
    """The record as it was before; a release restores it."""
    metadata: Mapping[str, Any] | None = None
    """What the record keeps besides."""
    state: State = State.PROCESSING
    """Where the record stood then: handled, where messages may wait to be sent."""

    @property
    def birth(self) -> int:
        """Distinguishes this claim from an earlier or later one of the same key."""
        return self.version >> _WRITES_BITS

    @property
    def identity(self) -> tuple[Key, int, int]:
        """The same however often it is extended: key, fence and birth."""
        return self.key, self.fence, self.version >> _WRITES_BITS

    @property
    def takes_over(self) -> bool:
        """Whether it replaces an earlier claim that ran out, whose effect may have happened."""
        return self.former is not None and self.former.state is State.PROCESSING


def claim_of(record: Record, former: Record | None = None) -> Claim:
    """The newest claim of a record."""
    return Claim(
        record.key,
        record.fence,
        record.version,
        record.attempts,
        former,
        record.metadata,
        record.state,
    )


def birth_of(number: int) -> int:
    """As much of `number` as a birth, and so a token, can hold."""
    return number % (1 << BIRTH_BITS)


def version_of(birth: int, writes: int = 0) -> int:
    """The version with this birth after so many writes.

    The count of writes continues when the birth changes: no version of a record is used twice.
    """
    return birth % (1 << BIRTH_BITS) << _WRITES_BITS | writes % (1 << _WRITES_BITS)
