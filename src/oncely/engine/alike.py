"""Requests that stand alike: the rules are asked once, and the answer is the same for all."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, eq, itemgetter
from typing import Any, NamedTuple, final

from oncely.core.commands import Granted, Outcome, Written
from oncely.core.record import Claim, Key, Record
from oncely.core.rules import (
    ALIKE_WHILE_HELD,
    COPIED,
    UNREAD_WITHOUT_HORIZON,
    VERSIONED,
    decide,
    first_version,
)
from oncely.engine.alike_requests import (
    AlikeAsks,
    AlikeRequests,
    AlikeWrites,
    MadeSequence,
    are_same,
)
from oncely.stores.alike import AlikeChanges, AlikeRecords

_FINGERPRINT = Record._fields.index("fingerprint")
_VERSION = Record._fields.index("version")
_alike_of = itemgetter(
    slice(1, _FINGERPRINT), slice(_FINGERPRINT + 1, _VERSION), slice(_VERSION + 1, None)
)
"""A record without its key, its fingerprint, which a claim's holder does not change, and its
version, which a claim's holder counts on.
"""
_fingerprint_of = itemgetter(_FINGERPRINT)
_version_of = itemgetter(_VERSION)
_metadata_of = attrgetter("metadata")
_result_of = attrgetter("result")
_claimed = partial(tuple.__new__, Claim)


@final
class AlikeOutcomes(MadeSequence[Outcome]):
    """One outcome for each of these records: as `first`, of the first. An outcome is made when it
    is looked at.
    """

    __slots__ = ("first", "records")
    __hash__ = None  # type: ignore[assignment]  # As a list has none.

    def __init__(self, first: Granted | Written, records: AlikeRecords) -> None:
        self.first = first
        self.records = records

    @property
    def keys(self) -> Sequence[Key]:
        """Their keys, in order."""
        return self.records.keys

    def __len__(self) -> int:
        return len(self.records)

    def _at(self, index: int) -> Outcome:
        record = self.records[index]
        if isinstance(self.first, Granted):
            return Granted(self.first.claim._replace(record=record))
        return Written(record)

    def __iter__(self) -> Iterator[Outcome]:
        if not isinstance(self.first, Granted):
            return map(Written, self.records)
        lease_s = self.first.claim.lease_s
        return map(Granted, map(_claimed, zip(self.records, repeat(lease_s), repeat(None))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    def __repr__(self) -> str:
        return repr([*self])


class AlikeDecision(NamedTuple):
    """One answer for many requests, and what to store so that it becomes true."""

    outcomes: AlikeOutcomes
    """The outcome of each, in the order of the requests."""
    old: AlikeRecords | None
    """The records as they are believed to be; None where there are none yet."""
    indexes: Sequence[int] | None = None
    """Which requests are answered, where one is of a message that another asks for before it: that
    one has to see what becomes of the first.
    """

    @property
    def new(self) -> AlikeRecords:
        """The records as they are to be."""
        return self.outcomes.records

    @property
    def changes(self) -> AlikeChanges:
        """What is changed, where records are there."""
        assert self.old is not None  # noqa: S101 - the caller's.
        return AlikeChanges(self.old, self.new)


def decide_alike(requests: AlikeRequests) -> AlikeDecision | None:
    """One decision for all of these, with which no horizon is concerned; None where each has to be
    decided by itself.
    """
    if len({key.consumer for key in requests.keys}) > 1:
        return None
    indexes = _of_firsts(requests.keys)
    if type(requests) is AlikeAsks:
        decision = _asked(requests if indexes is None else requests.at_indexes(indexes))
        return decision and decision._replace(indexes=indexes)
    return _held(requests) if indexes is None else None


def _of_firsts(keys: Sequence[Key]) -> Sequence[int] | None:
    """The places of the first request of each key; None where all are."""
    if len({*keys}) == len(keys):
        return None
    indexes = range(len(keys))
    return sorted(dict(zip(reversed(keys), reversed(indexes), strict=True)).values())


def _asked(asks: AlikeAsks) -> AlikeDecision | None:
    if asks.columns.keys() - COPIED - UNREAD_WITHOUT_HORIZON - VERSIONED:
        return None
    answer = decide(None, asks.first, 0.0)
    if answer.new is None or not isinstance(answer.outcome, Granted):
        return None
    columns = {name: of for name, of in asks.columns.items() if name in COPIED}
    if "token" in asks.columns:
        columns["version"] = [first_version(asks.first, each) for each in asks.columns["token"]]
    return AlikeDecision(
        AlikeOutcomes(answer.outcome, AlikeRecords(asks.keys, answer.new, columns)), None
    )


def _held(writes: AlikeWrites) -> AlikeDecision | None:
    command, records = writes[0].command, writes.records
    if type(command) not in ALIKE_WHILE_HELD or not _stand_alike(records):
        return None
    answer = decide(records[0], command, 0.0)
    if answer.new is None or answer.new is records[0] or not isinstance(answer.outcome, Written):
        return None
    versions = [*map(_version_of, records)]
    columns = _differing(fingerprint=[*map(_fingerprint_of, records)], version=versions)
    old = AlikeRecords(writes.keys, records[0], columns)
    counted = answer.new.version - records[0].version
    renewed = {"version": [n + counted for n in versions]} if "version" in columns else {}
    return AlikeDecision(AlikeOutcomes(answer.outcome, old.like(answer.new, **renewed)), old)


def _differing(**columns: Sequence[Any]) -> Mapping[str, Sequence[Any]]:
    """Those of which not all values are the same."""
    return {name: of for name, of in columns.items() if of.count(of[0]) < len(of)}


def _stand_alike(records: Sequence[Record]) -> bool:
    """Whether these differ in their keys, fingerprints and versions alone."""
    are_equal = all(map(eq, map(_alike_of, records), repeat(_alike_of(records[0]))))
    values = (_metadata_of, _result_of)
    return are_equal and all(are_same([*map(of, records)]) for of in values)
