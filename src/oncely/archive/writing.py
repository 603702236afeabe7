"""Moves records past their retention to the archive: first they are written, then removed."""

import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from oncely import ops
from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely.archive.layout import (
    UNFINISHED,
    ArchiveFolder,
    archive_at,
    bucket_of,
    date_of,
    folder_of,
    table_of,
)
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, OncelyError, mask_passwords
from oncely.core.record import Key, Record
from oncely.core.rules import PURGEABLE
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Note, Removed, audited

_log = EventLog(__name__)

_ROW_GROUP = 10_000
_PURGED_TOGETHER = 1_000
_ABANDONED = timedelta(days=1)


@dataclass(slots=True)
class Archived:
    """What became of one consumer's records."""

    archived: int = 0
    """In the archive now, and removed from the ledger."""
    left: int = 0
    """Old enough, and still in the ledger: messages that they deferred wait to be sent, or they
    have changed since they were read."""
    files: int = 0


def archive(
    ledger: Ledger,
    folder: str,
    older_than: Duration | None = None,
    *,
    consumer: str | None = None,
    retention: Mapping[str, Duration] | None = None,
    batch: int = 50_000,
    on_batch: Callable[[str, Archived], None] = lambda _, __: None,
    by: str,
    why: str = "",
) -> Removed[Archived]:
    """Move what `ops.purge` would remove to `folder`, a path or a URI that Arrow knows.

    A record leaves the ledger only after it was read back from the archive, and only if it is
    still as it was read. At most `batch` records are held in memory. After a crash call it again: a
    record that was archived and not yet removed is archived once more. It replaces itself, or is
    there twice with the same version. `on_batch` is called with a consumer and its counts so far.
    Noted in the audit as by `ops.purge`.

    Raises ConfigError for a folder that cannot be written to and as `ops.purge` does, OncelyError
    where what was written cannot be read back.
    """
    archive = _prepared(folder)
    kept = ops.retentions(ledger, older_than, consumer=consumer, retention=retention)
    archived = {name: Archived() for name in kept}
    with audited(ledger, "archived", Note.of(by, why), Key(consumer or "", "")) as tally:
        try:
            for name, age in kept.items():
                for _ in _archive_consumer(ledger, archive, name, age, batch, archived[name]):
                    on_batch(name, archived[name])
                ledger.purge_steps(age, name)
                count = archived[name].archived
                _log.info(
                    "%(count)s records of '%(consumer)s' are in the archive now",
                    extra={"event": "archived", "consumer": name, "count": count},
                )
        finally:
            # Also what was moved before the store went away, say.
            tally.changed = sum(each.archived for each in archived.values())
    return Removed(archived, tally.audit_error)


def _archive_consumer(
    ledger: Ledger,
    archive: ArchiveFolder,
    consumer: str,
    age: Duration,
    batch: int,
    so_far: Archived,
) -> Iterator[None]:
    """Archive batch by batch, least recently seen first, so that each batch touches few dates."""
    for state in PURGEABLE:
        stay: set[Key] = set()
        while True:
            limit = batch + len(stay)
            found = [r for r in ledger.scan(consumer, state, age, limit) if r.key not in stay]
            if not found:
                break
            waiting = ledger.mailbox.waiting({record.key for record in found})
            ready = [record for record in found if record.key not in waiting]
            so_far.files += _write(archive, consumer, ready)
            for start in range(0, len(ready), _PURGED_TOGETHER):
                part = ready[start : start + _PURGED_TOGETHER]
                purged = ledger.purge_found(part)
                reached("archive_purged")
                so_far.archived += len(purged)
                waiting |= {record.key for record in part} - purged
            stay |= waiting
            so_far.left += len(waiting)
            yield


# ---- Files -------------------------------------------------------------------------------------


def _prepared(folder: str) -> ArchiveFolder:
    """Create the archive's folder, and remove files that crashed runs have left unfinished."""
    archive = archive_at(folder)
    try:
        archive.files.create_dir(UNFINISHED)
    except OSError as error:
        shown = mask_passwords(folder)
        raise ConfigError(f"archive: {shown!r} cannot be written to: {error}") from error
    # Younger files may be another run's, which is still writing.
    before = datetime.now(UTC) - _ABANDONED
    for info in archive.files.get_file_info(fs.FileSelector(UNFINISHED)):
        if info.is_file and info.mtime < before:
            archive.files.delete_file(info.path)
    return archive


def _write(archive: ArchiveFolder, consumer: str, records: Sequence[Record]) -> int:
    """Write and verify the files of a batch; return how many."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        bucket = bucket_of(record.key.message_id)
        groups[f"date={date_of(record.last_seen)}/bucket={bucket:02}"].append(record)
    for folder, group in groups.items():
        group.sort(key=lambda record: record.key.message_id)
        _write_file(archive, f"{folder_of(consumer)}/{folder}", group)
    _sync(archive, {Path(folder_of(consumer), folder) for folder in groups})
    reached("archive_verified")
    return len(groups)


def _write_file(archive: ArchiveFolder, folder: str, records: Sequence[Record]) -> None:
    """Write a file aside, read it back, and only then put it where readers find it."""
    table = table_of(records)
    aside = f"{UNFINISHED}/{uuid.uuid4().hex}.parquet"
    archive.files.create_dir(folder)
    with archive.files.open_output_stream(aside) as stream:
        pq.write_table(table, stream, row_group_size=_ROW_GROUP, compression="zstd")
    _sync(archive, {Path(aside)})
    reached("archive_written")
    try:
        with archive.files.open_input_file(aside) as stream:
            is_same = pq.ParquetFile(stream).read().equals(table)
    except (pa.ArrowException, OSError) as error:
        raise OncelyError(f"archive: {aside} cannot be read back: {error}") from error
    if not is_same:
        raise OncelyError(f"archive: {aside} does not read back as it was written")
    # The same records have the same name: written once more after a crash, they replace themselves.
    lines = "\n".join(f"{record.version} {record.key.message_id}" for record in records)
    digest = sha256(lines.encode()).hexdigest()[:32]
    archive.files.move(aside, f"{folder}/part-{digest}.parquet")


def _sync(archive: ArchiveFolder, paths: Set[Path]) -> None:
    """Flush these, and the folders that list them, to the disk, so that they survive a crash."""
    if archive.folder is None:
        return
    for path in paths | {above for each in paths for above in each.parents}:
        opened = os.open(archive.folder / path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
