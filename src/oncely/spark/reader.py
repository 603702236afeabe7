"""The ledger as a DataFrame: read in parallel by ranges of keys, filters told to the store."""

import json
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import DataType, RecordBatch
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from oncely.core.record import Record, State
from oncely.ops import record_as_dict
from oncely.spark.ledgers import existing_ledger
from oncely.spark.reader_options import ReaderOptions
from oncely.stores.store import KeyRange, Span, Wanted

T = TypeVar("T")

_COLUMNS = {
    "consumer": "string",
    "message_id": "string",
    "state": "string",
    "standing": "string",
    "attempts": "int",
    "fence": "bigint",
    "first_seen": "timestamp",
    "last_seen": "timestamp",
    "lease_until": "timestamp",
    "exhausted": "boolean",
    "duplicates": "bigint",
    "error": "string",
    "metadata": "string",
    "result": "string",
    "fingerprint": "string",
    "version": "bigint",
}
"""The fields of a record under the names that `oncely list --json` has; JSON as text."""

SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in _COLUMNS.items())
"""As Spark writes it."""

_MOST_VALUES = 1_000
"""Values of a column that the store is told: a list that is longer is Spark's to look through."""
_SLACK_S = 1e-6
"""A column's times are rounded to microseconds, a store's may be finer."""


def open_reader(options: ReaderOptions) -> "LedgerReader":
    """The reader; one that takes filters from queries where it is told to."""
    return FilteringReader(options) if options.push_filters else LedgerReader(options)


class LedgerReader(DataSourceReader):
    """Reads a ledger. Plans on the driver, and reads as a copy in every task."""

    def __init__(self, options: ReaderOptions) -> None:
        self._options = options
        self._wanted = Wanted(
            consumers=None if options.consumer is None else frozenset([options.consumer]),
            states=None if options.state is None else frozenset([options.state]),
        )

    def partitions(self) -> Sequence[InputPartition]:
        """A range of keys for each task; one for all where a few ids are named."""
        ledger = existing_ledger(self._options.place)
        number = self._options.partitions if self._wanted.ids is None else 1
        return [InputPartition(keys) for keys in ledger.key_ranges(number)]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """The records of a range, a page at a time."""
        ledger = existing_ledger(self._options.place)
        keys: KeyRange = partition.value
        now = ledger.now()
        for page in ledger.read(keys, self._wanted):
            if page:
                yield _batch(page, now)


class FilteringReader(LedgerReader):
    """The same; what a query asks of keys, states and times is told to the store.

    Only where the user says so: Spark keeps what it has planned with the DataFrame, and a later
    query of that, or another part of the same query, would read by the filters of the first.
    """

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802 - Spark's name.
        """Narrow what is read. All filters stay Spark's as well: the store only reads less."""
        for each in filters:
            self._wanted = _narrowed(self._wanted, each)
        return filters


def _narrowed(wanted: Wanted, asked: Filter) -> Wanted:
    match asked:
        case EqualTo((name,), value):
            return _among(wanted, name, [value])
        case In((name,), values) if len(values) <= _MOST_VALUES:
            return _among(wanted, name, values)
        case GreaterThan((name,), value) | GreaterThanOrEqual((name,), value):
            return _within(wanted, name, Span(since=_moment(value, -_SLACK_S)))
        case LessThan((name,), value) | LessThanOrEqual((name,), value):
            return _within(wanted, name, Span(until=_moment(value, _SLACK_S)))
        case _:
            return wanted


def _among(wanted: Wanted, name: str, values: Sequence[Any]) -> Wanted:
    """`wanted` with one of these values in a column, where stores look at that."""
    match name:
        case "consumer":
            return wanted._replace(consumers=_both(wanted.consumers, values))
        case "message_id":
            return wanted._replace(ids=_both(wanted.ids, values))
        case "state":
            states = [state for state in State if state.word in values]
            return wanted._replace(states=_both(wanted.states, states))
        case _:
            return wanted


def _within(wanted: Wanted, name: str, span: Span) -> Wanted:
    """`wanted` with a time in a column, where that is one of those that stores look at."""
    match name:
        case "first_seen":
            return wanted._replace(first_seen=wanted.first_seen.within(span))
        case "last_seen":
            return wanted._replace(last_seen=wanted.last_seen.within(span))
        case _:
            return wanted


def _both(known: Collection[T] | None, asked: Collection[T]) -> frozenset[T]:
    return frozenset(asked) if known is None else frozenset(asked).intersection(known)


def _moment(value: Any, slack_s: float) -> float | None:
    """Seconds since 1970; None for what is no moment without a time zone to tell it by."""
    is_moment = isinstance(value, datetime) and value.tzinfo is not None
    return value.timestamp() + slack_s if is_moment else None


def _batch(records: Sequence[Record], now: float) -> RecordBatch:
    types: dict[str, DataType] = {
        "string": pa.string(),
        "int": pa.int32(),
        "bigint": pa.int64(),
        "boolean": pa.bool_(),
        "timestamp": pa.timestamp("us", tz="UTC"),
    }
    rows = [record_as_dict(record, now) for record in records]
    arrays = [
        pa.array([_value(name, type_, row[name]) for row in rows], types[type_])
        for name, type_ in _COLUMNS.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(_COLUMNS))


def _value(name: str, type_: str, value: Any) -> Any:
    if value is None:
        return None
    if type_ == "timestamp":
        return round(value * 1e6)
    return json.dumps(value) if name in ("metadata", "result") else value
