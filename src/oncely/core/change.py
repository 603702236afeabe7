"""Change: which fields of a record a rule changes, and to what."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

from oncely.core.record import Key, Record, State

Removal = Literal["removal"]
REMOVAL: Final = "removal"
"""In place of a Change: the record is to be removed."""


class Fields(TypedDict, total=False):
    """What is written. A field that is not there stays; in a new record, it has its default."""

    state: State
    attempts: int
    fence: int
    lease_s: float | None
    """Seconds from the write until the lease ends, or a retry is due; None: there is no end."""
    exhausted: bool
    duplicates: int
    metadata: Mapping[str, Any] | None
    result: Any
    fingerprint: str | None
    worker: int | None


class Change(NamedTuple):
    """What is written in a record, whose last time seen is then."""

    version: int
    fields: Fields

    def but(self, version: int | None = None, **fields: Unpack[Fields]) -> "Change":
        """The same change, but for these fields."""
        return Change(self.version if version is None else version, {**self.fields, **fields})

    def to(self, record: Record, now: float) -> Record:
        """The record after it was written at `now`, by the store's clock."""
        return record._replace(version=self.version, **at_time(self.fields, now))

    def to_new(self, key: Key, now: float) -> Record:
        """The new record that is written at `now`, by the store's clock."""
        return self.to(Record(key, State.PROCESSING, 0, 0, now, now), now)


def at_time(fields: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Changed fields as a record has them that is written at `now`."""
    written = {**fields, "last_seen": now}
    if "lease_s" in written:
        lease_s = written.pop("lease_s")
        written["lease_until"] = None if lease_s is None else now + lease_s
    return written
