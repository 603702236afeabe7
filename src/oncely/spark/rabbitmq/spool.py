"""A spool: a folder of numbered segments, each a durable file of messages of a source.

Segments are numbered from 1 without gaps, and no number is used twice.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import RecordBatch, Table
from pyarrow.parquet import read_metadata

from oncely._util.crash_points import reached
from oncely.core.errors import ConfigError, OncelyError
from oncely.core.message import Message

_LOCK_WAIT_S = 30.0
"""How long to wait for the lock: a source whose driver was killed first ends its current work."""
_POLL_S = 0.05
_ROWS_READ = 1_000
_UNFINISHED = ".segment-"


class Spool:
    """The segments of one queue in one folder, to which one process at a time may add."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._owner: TextIO | None = None

    def open(self, queue: str, wait_s: float = _LOCK_WAIT_S) -> None:
        """Create the folder if it is missing, and lock it for writing, until `close`.

        Waits for another process that holds the lock. Raises ConfigError if that keeps it, if the
        folder holds messages of another queue, or if the folder cannot be created.
        """
        try:
            # With its parents, so that they survive a power failure.
            missing = [each for each in (self._folder, *self._folder.parents) if not each.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            for each in missing:
                _sync(each.parent)
            owner = (self._folder / ".queue").open("a+", encoding="utf-8")
        except OSError as error:
            raise self._wrong(f"cannot be made: {error.strerror}") from error
        try:
            self._lock(owner, wait_s)
            # The queue's name is written into the lock file, or is there already.
            owner.seek(0)
            told = owner.read()
            if told not in ("", queue):
                text = f"holds messages of queue {told!r}, not {queue!r}; name another one"
                raise self._wrong(text)
            if not told:
                owner.write(queue)
                owner.flush()
                os.fsync(owner.fileno())
        except BaseException:
            owner.close()
            raise
        self._owner = owner
        for file in self._folder.glob(f"{_UNFINISHED}*"):
            file.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def numbers(self) -> list[int]:
        """The numbers of the segments, in order."""
        files = self._folder.glob("segment-*.parquet")
        return sorted(int(file.stem.removeprefix("segment-")) for file in files)

    def file(self, number: int) -> Path:
        """The file of the segment with that number."""
        return self._folder / f"segment-{number:012}.parquet"

    def files(self, numbers: Sequence[int]) -> list[str]:
        """The files of these segments. Raises OncelyError if one is gone."""
        there = set(self.numbers())
        if gone := [number for number in numbers if number not in there]:
            raise OncelyError(
                f"spool: segment {gone[0]} is not in {str(self._folder)!r}, and the checkpoint "
                "asks for it; with a new checkpoint all that is there is read again"
            )
        return [str(self.file(number)) for number in numbers]

    def end_of_next(self, start: int, max_messages: int) -> int:
        """The last of the segments after `start` that together hold at most so many messages, or
        the first one if it alone holds more; `start` if no segment follows.
        """
        end, messages = start, 0
        for number in self.numbers():
            if number > start:
                messages += read_metadata(self.file(number)).num_rows
                if messages > max_messages and end > start:
                    break
                end = number
        return end

    def write(self, messages: Sequence[Message], after: int = 0) -> int:
        """Write the next segment, with a number above `after`; return the number when durable.

        Raises OncelyError if it cannot be written.
        """
        number = max([after, *self.numbers()]) + 1
        whole = self.file(number)
        unfinished = self._folder / f"{_UNFINISHED}{number}"
        try:
            with unfinished.open("wb") as file:
                pq.write_table(_table(messages), file)
                file.flush()
                os.fsync(file.fileno())
            reached("segment_written")
            unfinished.rename(whole)
            _sync(self._folder)
        except OSError as error:
            raise OncelyError(f"spool: {str(whole)!r} cannot be written: {error}") from error
        return number

    def remove(self, through: int, keep: int) -> None:
        """Remove the segments up to `through`, except the newest `keep` of them. At least one
        stays, as it shows which number comes next.
        """
        numbers = [number for number in self.numbers() if number <= through]
        for number in numbers[: -max(1, keep)]:
            self.file(number).unlink()

    def _lock(self, owner: TextIO, wait_s: float) -> None:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    raise self._wrong("is in use by another query; name another folder") from error
                time.sleep(_POLL_S)

    def _wrong(self, text: str) -> ConfigError:
        return ConfigError(f"option spool: {str(self._folder)!r} {text}")


def read_segment(file: str) -> Iterator[RecordBatch]:
    """The messages of a segment. Raises OncelyError if its file cannot be read here."""
    try:
        with pq.ParquetFile(file) as segment:
            yield from segment.iter_batches(_ROWS_READ)
    except OSError as error:
        raise OncelyError(
            f"spool: {file!r} cannot be read here: {error}; on a cluster the spool is a folder "
            "that all machines share"
        ) from error


def _table(messages: Sequence[Message]) -> Table:
    text, time = pa.string(), pa.timestamp("us", tz="UTC")
    headers = [list(message.headers.items()) for message in messages]
    columns = {
        "id": pa.array([message.id or None for message in messages], text),
        "type": pa.array([message.type or None for message in messages], text),
        "body": pa.array([message.body for message in messages], pa.binary()),
        "headers": pa.array(headers, pa.map_(text, text)),
        "source": pa.array([message.source or None for message in messages], text),
        "time": pa.array([_time(message.time) for message in messages], time),
        "key": pa.array([message.key for message in messages], text),
    }
    return pa.table(columns)


def _time(time: datetime | None) -> datetime | None:
    """The time in UTC; None if UTC's calendar does not have it."""
    try:
        return time and (time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC))
    except OverflowError:
        return None


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
