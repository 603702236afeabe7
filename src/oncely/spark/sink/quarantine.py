"""The quarantine: rows that are not messages, as Parquet, with the reason and the original row."""

import contextlib
import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileSystem

from oncely.spark.sink.message_rows import Row

_BUFFERED_ROWS = 1_000
_SCHEMA = pa.schema(
    {
        "reason": pa.string(),
        "id": pa.string(),
        "row": pa.string(),
        "quarantined_at": pa.timestamp("us", tz="UTC"),
    }
)


class Quarantine:
    """One Parquet file for one task; it has its own name only when it is complete.

    The name is the same for every attempt of a task, so that rows of a failed attempt are replaced,
    not doubled. `folder` is a path, or a URI that Arrow knows (s3:, gs:, hdfs:). A hidden folder of
    the batch lists the files that its attempts have begun.
    """

    def __init__(self, folder: str, batch: str, partition: int = 0) -> None:
        self._folder = folder
        self._beside = _beside(batch)
        self._name = f"{batch}-{partition:05d}.parquet"
        # Two attempts of one task may run at a time.
        self._unfinished_name = f"{self._beside}/{self._name}.{uuid4().hex}"
        self._rows: list[dict[str, Any]] = []
        self._writer: Any = None

    def add(self, row: Row, reason: str) -> None:
        """Set `row` aside."""
        self.add_entry(entry_of(row, reason))

    def add_entry(self, entry: Mapping[str, str | None]) -> None:
        """Set a row aside, given its entry of `entry_of`."""
        self._rows.append({**entry, "quarantined_at": datetime.now(UTC)})
        if len(self._rows) >= _BUFFERED_ROWS:
            self._flush()

    def close(self) -> str | None:
        """Finish the file; return its name, or None if no row was set aside."""
        if self._rows:
            self._flush()
        if self._writer is None:
            return None
        self._writer.close()
        files, path = FileSystem.from_uri(self._folder)
        files.open_output_stream(f"{path}/{self._beside}/{self._name}").close()
        files.move(f"{path}/{self._unfinished_name}", f"{path}/{self._name}")
        return self._name

    def discard(self) -> None:
        """Remove the file of a failed attempt, if possible."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
                files, path = FileSystem.from_uri(self._folder)
                files.delete_file(f"{path}/{self._unfinished_name}")

    def _flush(self) -> None:
        if self._writer is None:
            files, path = FileSystem.from_uri(self._folder)
            files.create_dir(f"{path}/{self._beside}", recursive=True)
            unfinished = f"{path}/{self._unfinished_name}"
            self._writer = pq.ParquetWriter(unfinished, _SCHEMA, filesystem=files)
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=_SCHEMA))
        self._rows.clear()


def entry_of(row: Row, reason: str) -> dict[str, str | None]:
    """The quarantine's entry of a row."""
    text = row.original and _storable(row.original)
    if text is None:
        # The row came without its original: its fields as text.
        values = row._replace(number=None, taken=None)._asdict()  # type: ignore[arg-type]
        columns = {name: value for name, value in values.items() if value is not None}
        text = json.dumps(columns, default=plain)
    return {"reason": reason, "id": row.id and _storable(row.id), "row": text}


def _beside(batch: str) -> str:
    # Readers of Parquet folders skip names that begin with a dot.
    return f".{batch}"


def remove_stale(folder: str, batch: str, whole: Collection[str | None]) -> None:
    """Remove the files of a batch that an earlier attempt at it wrote under other names."""
    files, path = FileSystem.from_uri(folder)
    begun = FileSelector(f"{path}/{_beside(batch)}", allow_not_found=True)
    for name in {found.base_name for found in files.get_file_info(begun)} - set(whole):
        # The file was begun, but may never have been created.
        with contextlib.suppress(FileNotFoundError):
            files.delete_file(f"{path}/{name}")


def forget_attempts(folder: str, batch: str) -> None:
    """Remove the hidden folder of a batch that has no more attempts."""
    files, path = FileSystem.from_uri(folder)
    with contextlib.suppress(FileNotFoundError):
        files.delete_dir(f"{path}/{_beside(batch)}")


def _storable(text: str) -> str:
    """`text` with lone surrogates escaped, so that Parquet accepts it."""
    return text.encode("utf-8", "backslashreplace").decode()


def plain(value: object) -> str:
    """A value that JSON does not know, as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
