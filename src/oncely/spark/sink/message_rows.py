"""Rows of a message DataFrame: checks the schema, reads Arrow in chunks, and makes messages."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.types import StructType

from oncely.core.errors import ConfigError
from oncely.core.ids import fingerprint_of
from oncely.core.message import Message
from oncely.core.waiting import WaitingMessage

if TYPE_CHECKING:
    # Not needed on a pipeline's driver.
    from pyarrow import Array, RecordBatch, Scalar

ROW_COLUMN = "oncely_row"
"""The original row as text, for the quarantine; the pipeline adds it."""
BROKEN_COLUMN = "oncely_broken"
"""Why the row is not a message, if the source's format shows it; the pipeline adds it."""

COLUMN_TYPES = {
    "id": ("string",),
    "type": ("string",),
    "body": ("string", "binary"),
    "headers": ("map<string,string>",),
    "source": ("string",),
    "time": ("timestamp", "timestamp_ntz"),
    "key": ("string",),
    ROW_COLUMN: ("string",),
    BROKEN_COLUMN: ("string",),
}
"""The columns of a message DataFrame, of which only `id` is required, and their Spark types."""
COLUMNS_OF_ROWS = ("id", ROW_COLUMN, BROKEN_COLUMN)
"""Those that mode `rows` has, too: all others are the user's."""


class Row(NamedTuple):
    """One delivery of the source. The first fields are in the order of COLUMN_TYPES."""

    id: str
    type: str | None = None
    body: str | bytes | None = None
    headers: Sequence[tuple[str, str | None]] | None = None
    source: str | None = None
    time: datetime | None = None
    key: str | None = None
    original: str | None = None
    broken: str | None = None
    number: int = -1
    """Its place in the input of its task."""
    taken: WaitingMessage | None = None
    """The message that waited in the ledger, if the row comes from there."""

    def body_bytes(self) -> bytes:
        """The body; empty if there is none."""
        if isinstance(self.body, str):
            return self.body.encode("utf-8", "surrogateescape")
        return self.body or b""

    def fingerprint(self) -> str | None:
        """The fingerprint of the body: it tells apart two bodies of one id. None without a body."""
        return None if self.body is None else fingerprint_of(self.body_bytes())

    def message(self) -> Message:
        """The message for the handler."""
        if self.taken is not None:
            # With the parts that no column holds.
            return self.taken.message
        return Message(
            self.id,
            self.body_bytes(),
            self.type or "",
            # A header is text: one without a value is left out.
            {name: value for name, value in self.headers or () if value is not None},
            self.source or "",
            self.time,
            key=self.key,
        )


def check_schema(schema: StructType) -> None:
    """Raises ConfigError for a DataFrame whose columns are not a message's."""
    check_types(schema)
    for name in schema.names:
        if name not in COLUMN_TYPES:
            raise ConfigError(
                f"column {name!r} is not part of a message; drop it, or put it into 'body'"
            )


def check_types(schema: StructType, names: Collection[str] = COLUMN_TYPES) -> None:
    """Raises ConfigError if `id` is missing, or if one of these columns has a wrong type."""
    check_has_id(schema.names)
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name in names:
        if name in types and types[name] not in COLUMN_TYPES[name]:
            type_ = COLUMN_TYPES[name][0]
            raise ConfigError(
                f"column {name!r} is {types[name]}; it must be {type_}:"
                f' write "cast({name} AS {type_.upper()})"'
            )


def check_has_id(columns: Sequence[str]) -> None:
    """Raises ConfigError without a column `id`."""
    if "id" not in columns:
        raise ConfigError(f"the DataFrame has no column 'id', only {', '.join(sorted(columns))}")


def numbered(
    batches: Iterable["RecordBatch"],
) -> Iterator[tuple[Sequence[int], "RecordBatch"]]:
    """Batches with the numbers of their rows."""
    start = 0
    for batch in batches:
        end = start + batch.num_rows
        yield range(start, end), batch
        start = end


def read_chunks(
    batches: Iterable[tuple[Sequence[int], "RecordBatch"]], size: Callable[[], int]
) -> Iterator[list[Row]]:
    """The rows of `batches`, which come with their numbers, in lists of at most `size()`, which is
    called for each list.

    A row with a value that Python cannot hold is marked broken, and the value is left out.
    """
    for numbers, batch in batches:
        start = 0
        while start < batch.num_rows:
            chunk = batch.slice(start, size())
            end = start + chunk.num_rows
            broken: dict[int, str] = {}
            names = set(chunk.schema.names)
            columns = [
                values_of(name, chunk.column(name), broken) if name in names else repeat(None)
                for name in COLUMN_TYPES
            ]
            values = zip(*columns, numbers[start:end], repeat(None), strict=False)
            rows = list(map(Row._make, values))
            for index, reason in broken.items():
                if rows[index].broken is None:
                    rows[index] = rows[index]._replace(broken=reason)
            yield rows
            start = end


def values_of(name: str, column: "Array", broken: dict[int, str]) -> list[Any]:
    """The Python values, times in UTC; None for a value that Python cannot hold, which is noted in
    `broken`.
    """
    column = in_utc(column)
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):
        values = []
        for index, scalar in enumerate(column):
            try:
                values.append(_value(scalar))
            except (ValueError, OverflowError):
                values.append(None)
                broken[index] = f"unreadable {name}"
        return values


def in_utc(column: "Array") -> "Array":
    """Times in UTC: Spark's session zone, such as "UTC+3", may be unknown to Python."""
    if getattr(column.type, "tz", None) is None:
        return column
    from pyarrow import timestamp

    return column.cast(timestamp("us", "UTC"))


def _value(scalar: "Scalar") -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if scalar.type not in ("string", "large_string"):
            raise
        # Spark does not check the bytes of a string. Bytes that are not UTF-8 become lone
        # surrogates here: an id may not have them, and a body gets its bytes back.
        return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
