"""The ledger as a DataFrame: read in parallel by ranges of keys, a page at a time."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyarrow import DataType, RecordBatch
from pyspark.sql.datasource import DataSourceReader, InputPartition

from oncely.core.errors import ConfigError
from oncely.core.record import Record, State
from oncely.locations import LedgerAddress, absolute_location, check_shared
from oncely.ops import record_as_dict
from oncely.spark.ledgers import existing_ledger
from oncely.spark.option_values import (
    check_consumer,
    choice,
    refuse_unknown,
    required,
    whole_number,
)
from oncely.stores.names import TABLE_NAME
from oncely.stores.store import KeyRange, Wanted

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
    "worker": "bigint",
}
"""The fields of a record, by the names of `oncely list --json`; JSON as text."""

SCHEMA = ", ".join(f"{name} {type_}" for name, type_ in _COLUMNS.items())
"""The schema in Spark's DDL."""


_NAMES = (
    *("ledger", "ledger_table", "ledger_schema", "consumer", "state"),
    *("seen_from", "seen_before", "partitions"),
)
_DEFAULT_PARTITIONS = 8


def read_reader_options(options: Mapping[str, str]) -> "LedgerReader":
    """The reader for these options, checked. Raises ConfigError, which names the option."""
    given = {name.lower(): value for name, value in options.items()}
    refuse_unknown(given, _NAMES)
    ledger = absolute_location(required(given, "ledger", "sqlite:////var/lib/ledger.db"))
    table, schema = given.get("ledger_table", TABLE_NAME), given.get("ledger_schema")
    state = given.get("state")
    words = {state.word: state for state in State}
    # The status in the table is accepted, too.
    stored = {state.value: state.word for state in State}
    wanted = Wanted(
        consumers=frozenset([check_consumer(given["consumer"])]) if "consumer" in given else None,
        states=None
        if state is None
        else frozenset([words[choice("state", stored.get(state, state), words)]]),
        seen_from=_moment(given, "seen_from"),
        seen_before=_moment(given, "seen_before"),
    )
    address = LedgerAddress(check_shared(ledger), table, schema)
    return LedgerReader(address, wanted, whole_number(given, "partitions", _DEFAULT_PARTITIONS))


def _moment(given: Mapping[str, str], name: str) -> float | None:
    """A time in seconds since 1970; one without a time zone is UTC."""
    if name not in given:
        return None
    try:
        moment = datetime.fromisoformat(given[name])
    except ValueError:
        raise ConfigError(
            f"option {name}: {given[name]!r} is not a time; write "
            '"2026-01-31" or "2026-01-31 12:00:00"'
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class LedgerReader(DataSourceReader):
    """Reads the `wanted` records of the ledger at `address`, in at most `partitions` ranges of
    keys: plans on the driver, and reads as a copy in each task.
    """

    def __init__(self, address: LedgerAddress, wanted: Wanted, partitions: int) -> None:
        self._address = address
        self._wanted = wanted
        self._partitions = partitions

    def partitions(self) -> Sequence[InputPartition]:
        """A range of keys for each task."""
        ledger = existing_ledger(self._address)
        return [InputPartition(keys) for keys in ledger.key_ranges(self._partitions)]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """The records of a range, a page at a time."""
        ledger = existing_ledger(self._address)
        keys: KeyRange = partition.value
        now = ledger.now()
        for page in ledger.read(keys, self._wanted):
            if page:
                yield _batch(page, now)


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
