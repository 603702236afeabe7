"""The words of the ledger: key, state, record, claim."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

_WRITES_BITS = 24
_BIRTHS = 1 << 39


class State(StrEnum):
    """Where a record stands. The values are what the table's status column holds."""

    PROCESSING = "processing"
    HANDLED = "handled"
    COMPLETED = "sent"
    FAILED = "failed"


class Key(NamedTuple):
    """What a record is found by: two consumers never see each other's records."""

    consumer: str
    message_id: str


class Record(NamedTuple):
    """One ledger row. Times are seconds since 1970 by the store's clock."""

    key: Key
    state: State
    attempts: int
    """Handler runs granted so far, also those that never came to an end."""
    fence: int
    """Grows with every granted claim; only the holder of the newest may write."""
    first_seen: float
    last_seen: float
    lease_until: float | None = None
    """When the claim on a record in processing runs out; None for never."""
    metadata: Mapping[str, Any] | None = None
    result: Any = None
    fingerprint: str | None = None
    exhausted: bool = False
    """Failed for good: claimed again only after a reset."""
    duplicates: int = 0
    """Deliveries turned away since the record was completed."""
    version: int = 0
    """Compared by swaps. The low 24 bits count writes; the high ones, its birth, are drawn with
    every grant and change with a release. So a claim from before a release, a purge or a forget is
    never taken for a later one, and a worker whose answer was lost knows its own grant again."""

    @property
    def error(self) -> str | None:
        """Why the last attempt failed."""
        error = self.metadata.get("error") if self.metadata else None
        # A service that shares the table may have kept something else than a text.
        return error if error is None or isinstance(error, str) else repr(error)

    @property
    def birth(self) -> int:
        """Tells this claim, or this record, from an earlier one under the same key."""
        return self.version >> _WRITES_BITS

    def is_same_write(self, other: "Record") -> bool:
        """Whether both stem from one write, and not from two that were decided side by side."""
        return self.version == other.version and (self.fence, self.state) == (
            other.fence,
            other.state,
        )


class Claim(NamedTuple):
    """The right to process a message now, as it was granted."""

    record: Record
    """The record as the claim wrote it. Its times may count from the claim: the store's clock
    decides, and the holder of a claim does not know it."""
    lease_s: float | None = None
    """How long the claim lasts unless it is extended; None for ever."""
    former: Record | None = None
    """The record as it was before; a release restores it."""

    @property
    def key(self) -> Key:
        """The consumer and message id that the claim is for."""
        return self.record.key

    @property
    def fence(self) -> int:
        """Hand it to outside services that can refuse an older one."""
        return self.record.fence

    @property
    def attempts(self) -> int:
        """Handler runs granted so far, this one included."""
        return self.record.attempts


def first_version(draw: int) -> int:
    """The version of a new birth, from `draw`, a random number of up to 39 bits."""
    return draw % _BIRTHS << _WRITES_BITS
