"""Looks messages up in an archive: reads only those of its files that can hold them."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from socket import gethostname
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from oncely._util.event_log import EventLog
from oncely.archive.layout import SCHEMA, Part, archive_at, bucket_of, date_of, parts, record_of
from oncely.core.commands import Acquire, Duplicate, Exhausted, Granted, Mismatch
from oncely.core.errors import ConfigError, mask_passwords
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, State
from oncely.core.rules import decide

_log = EventLog(__name__)

SKEW_S = 86_400.0
"""Seconds that the clock of a message's sender may be ahead of the ledger's."""
_NOBODYS = -1
"""The token of a command that is only decided, never stored: no record has it as its birth."""
_ID, _STATUS, _LAST_SEEN = (SCHEMA.names.index(n) for n in ("message_id", "status", "last_seen"))

Refusal = Duplicate | Exhausted | Mismatch
"""What the rules answer for an archived message that must not run again."""


class Old(NamedTuple):
    """A message that the ledger does not know, and may have forgotten."""

    message_id: str
    sent_at: float
    """Seconds since 1970."""
    fingerprint: str | None = None


@dataclass(slots=True)
class NotCovered:
    """Not in the archive, and from a time that it does not cover: it may have been handled."""


Answer = Refusal | NotCovered
"""Why a message must not run."""


class Archive:
    """The archived records of one consumer in `folder`, a path or a URI that Arrow knows.

    Raises ConfigError for a folder that cannot be opened, or does not exist. For a URI, `judge`
    raises it, when it finds no files.
    """

    def __init__(self, folder: str, consumer: str) -> None:
        archive = archive_at(folder)
        self._files = archive.files
        self._shown = mask_passwords(folder)
        self._consumer = consumer
        if archive.folder is not None:
            self._check_there()

    def judge(self, old: Sequence[Old], policy: Policy) -> list[Answer | None]:
        """Why each must not run, as the rules say by its archived record; None where it may run.

        Ask after the ledger has said that it does not know them: a record is in the archive
        before it leaves the ledger.
        """
        there = parts(self._files, self._consumer)
        if not there:
            self._check_there()
        sent_at: dict[str, float] = {}
        for message_id, at, _ in old:
            sent_at[message_id] = min(at, sent_at.get(message_id, at))
        found = self._find(there, sent_at)
        covered = self._covered_from(there) + SKEW_S if len(found) < len(sent_at) else 0.0
        answers: list[Answer | None] = []
        for message in old:
            record = found.get(message.message_id)
            if record is not None:
                answers.append(_answer(record, message, policy))
            else:
                answers.append(NotCovered() if message.sent_at < covered else None)
        return answers

    def _check_there(self) -> None:
        # A folder that is not mounted here, or mistyped, would look like an empty archive.
        if self._files.get_file_info("").type is not fs.FileType.Directory:
            raise ConfigError(
                f"archive: {gethostname()} sees no folder {self._shown!r}; mount it there, or let"
                f" `oncely archive --to {self._shown}` make it"
            )

    def _covered_from(self, there: Sequence[Part]) -> float:
        """The time since which every completed message is in the archive, or still in the ledger;
        infinite where nothing is archived. Seconds since 1970, by the ledger's clock.
        """
        # A purge without an archive removed records before all that were last seen later, so the
        # first archived one tells. It has to be completed: a failed one may have been spared by
        # that purge, because messages of it waited to be sent.
        completed = State.COMPLETED.value
        for _, of_day in groupby(there, key=lambda part: part.date):
            times: list[float] = []
            for part in of_day:
                with self._files.open_input_file(part.path) as stream:
                    groups = list(_groups(pq.ParquetFile(stream).metadata))
                for group in groups:
                    status = group.column(_STATUS).statistics
                    if status.min == status.max == completed:
                        times.append(group.column(_LAST_SEEN).statistics.min.timestamp())
            if times:
                return min(times)
        return math.inf

    # ---- Reading -------------------------------------------------------------------------------

    def _find(self, there: Iterable[Part], sent_at: Mapping[str, float]) -> Mapping[str, Record]:
        """The records of messages by their ids; `sent_at` says when each message was sent.

        Of several records of a message, the completed one, else the one that was seen last.
        """
        found: dict[str, Record] = {}
        # A record was last seen after its message was sent, so dates before that are passed over.
        first_dates = {id_: date_of(at - SKEW_S) for id_, at in sent_at.items()}
        by_bucket: dict[int, list[str]] = {}
        for id_ in sorted(sent_at):
            by_bucket.setdefault(bucket_of(id_), []).append(id_)
        for part in there:
            wanted = [
                id_
                for id_ in by_bucket.get(part.bucket, ())
                if first_dates[id_] <= part.date
                # A message that had failed may have been completed later.
                and not (id_ in found and found[id_].state is State.COMPLETED)
            ]
            for record in self._read(part, wanted) if wanted else ():
                known = found.get(record.key.message_id)
                if known is None or _rank(record) > _rank(known):
                    found[record.key.message_id] = record
        return found

    def _read(self, part: Part, wanted: Sequence[str]) -> Iterator[Record]:
        """The records of `wanted`, sorted ids, that are in a file."""
        sought = pa.array(wanted, pa.string())
        with self._files.open_input_file(part.path) as stream:
            file = pq.ParquetFile(stream)
            groups = [
                number
                for number, group in enumerate(_groups(file.metadata))
                if _may_hold(group.column(_ID).statistics, wanted)
            ]
            _log.debug(
                "file %(path)s of the archive is read: row groups %(row_groups)s",
                extra={"event": "archive_read", "path": part.path, "row_groups": len(groups)},
            )
            for number in groups:
                ids = file.read_row_group(number, columns=["message_id"]).column(0)
                hits = pc.is_in(ids, value_set=sought)
                if pc.any(hits).as_py():
                    for row in file.read_row_group(number).filter(hits).to_pylist():
                        yield record_of(self._consumer, row)


def _groups(metadata: pq.FileMetaData) -> Iterator[pq.RowGroupMetaData]:
    return (metadata.row_group(number) for number in range(metadata.num_row_groups))


def _may_hold(statistics: pq.Statistics | None, wanted: Sequence[str]) -> bool:
    """Whether one of the ids, which are sorted, is within the bounds of a row group's."""
    if statistics is None or not statistics.has_min_max:
        return True
    at = bisect_left(wanted, statistics.min)
    return at < len(wanted) and wanted[at] <= statistics.max


def _rank(record: Record) -> tuple[bool, float]:
    return record.state is State.COMPLETED, record.last_seen


def _answer(record: Record, old: Old, policy: Policy) -> Refusal | None:
    """What the rules answer to a claim of a message with that record; None where it may run."""
    key = Key(record.key.consumer, old.message_id)
    ask = Acquire(key, policy, policy.lease_s, _NOBODYS, fingerprint=old.fingerprint)
    # Nothing in the archive has a lease, so the time does not matter.
    outcome = decide(record, ask, now=record.last_seen).outcome
    match outcome:
        case Granted():
            return None
        case Duplicate() | Exhausted() | Mismatch():
            return outcome
        case _:
            raise AssertionError(f"{outcome} for a record that was purged")
