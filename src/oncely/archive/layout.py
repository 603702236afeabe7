"""How an archive is laid out: its folders, the columns of its files, records as rows of them.

    FOLDER/consumer=billing/date=2026-03-01/bucket=07/part-<digest>.parquet

The date is that of `last_seen`, in UTC. Retention goes by it, so what leaves the ledger, and later
the archive, leaves in its order; and no record was last seen before its message was sent.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from oncely.core.errors import ConfigError, mask_passwords
from oncely.core.record import Key, Record, State

BUCKETS = 16
UNFINISHED = "_unfinished"
"""The folder of files that are being written: readers of Parquet skip names that begin so."""
_FIRST_S = datetime.min.replace(tzinfo=UTC).timestamp()
"""Where the calendar begins."""

_time = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("attempts", pa.int64(), nullable=False),
        pa.field("fence", pa.int64(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("first_seen", _time, nullable=False),
        pa.field("last_seen", _time, nullable=False),
        pa.field("exhausted", pa.bool_(), nullable=False),
        pa.field("duplicates", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.string()),
        pa.field("metadata", pa.string()),
        pa.field("result", pa.string()),
    ]
)

_AS_THEY_ARE = ("attempts", "fence", "version", "exhausted", "duplicates", "fingerprint")
"""The fields of a record that are columns without any change."""

_PART = re.compile(r"date=(\d{4}-\d\d-\d\d)/bucket=(\d\d)/part-[0-9a-f]+\.parquet")


class ArchiveFolder(NamedTuple):
    """Where an archive is."""

    files: fs.FileSystem
    """Its paths begin in the archive's folder."""
    folder: Path | None
    """The folder, where it is on a disk of this machine."""


class Part(NamedTuple):
    """A file of an archive."""

    path: str
    date: str
    bucket: int


def archive_at(folder: str) -> ArchiveFolder:
    """Where `folder` is, a path or a URI that Arrow knows. Raises ConfigError."""
    try:
        if "://" not in folder:
            files, path = fs.LocalFileSystem(), str(Path(folder).absolute())
        else:
            files, path = fs.FileSystem.from_uri(folder)
    except (pa.ArrowException, ValueError, OSError) as error:
        shown = mask_passwords(folder)
        raise ConfigError(
            f"archive: {shown!r} is not a folder that can be opened: {error}"
        ) from error
    is_local = isinstance(files, fs.LocalFileSystem)
    if is_local and Path(path).exists() and not Path(path).is_dir():
        raise ConfigError(f"archive: {path!r} is a file; name a folder")
    return ArchiveFolder(fs.SubTreeFileSystem(path, files), Path(path) if is_local else None)


def folder_of(consumer: str) -> str:
    """The folder of a consumer's records, its name escaped as Hive and Spark do."""
    return "consumer=" + "".join(
        letter
        if letter.isalnum() or letter in "_.-" or ord(letter) > 127
        else f"%{ord(letter):02X}"
        for letter in consumer
    )


def date_of(at: float) -> str:
    """The day, in UTC, of a time in seconds since 1970; for times before the calendar begins, its
    first day.

    As strings, days sort in the order of time.
    """
    return datetime.fromtimestamp(max(at, _FIRST_S), UTC).date().isoformat()


def bucket_of(message_id: str) -> int:
    """The bucket of an id within a day: `crc32(message_id) % 16`, in Spark's SQL as well."""
    return zlib.crc32(message_id.encode()) % BUCKETS


def parts(files: fs.FileSystem, consumer: str) -> list[Part]:
    """The files that are there now, by date."""
    selector = fs.FileSelector(folder_of(consumer), allow_not_found=True, recursive=True)
    found = []
    for info in files.get_file_info(selector):
        match = _PART.fullmatch(info.path.partition("/")[2])
        if match:
            found.append(Part(info.path, match[1], int(match[2])))
    return sorted(found, key=lambda part: (part.date, part.path))


# ---- Records as rows ---------------------------------------------------------------------------


def table_of(records: Sequence[Record]) -> pa.Table:
    """Records of one consumer as a table."""
    columns: dict[str, list[Any]] = {
        "message_id": [record.key.message_id for record in records],
        "status": [record.state.value for record in records],
        "first_seen": [round(record.first_seen * 1_000_000) for record in records],
        "last_seen": [round(record.last_seen * 1_000_000) for record in records],
        "metadata": [_json(record.metadata) for record in records],
        "result": [_json(record.result) for record in records],
    }
    columns |= {name: [getattr(record, name) for record in records] for name in _AS_THEY_ARE}
    arrays = [pa.array(columns[field.name], field.type) for field in SCHEMA]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def record_of(consumer: str, row: Mapping[str, Any]) -> Record:
    """The record in a row."""
    return Record(
        key=Key(consumer, row["message_id"]),
        state=State(row["status"]),
        first_seen=row["first_seen"].timestamp(),
        last_seen=row["last_seen"].timestamp(),
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        result=None if row["result"] is None else json.loads(row["result"]),
        **{name: row[name] for name in _AS_THEY_ARE},
    )


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
