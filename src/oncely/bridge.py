"""The bridge: moves the messages of a source into a queue of a ledger, or into files for Spark."""

import json
import os
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import (
    BrokerRefused,
    ConfigError,
    ContentionError,
    MessageError,
    StoreUnavailable,
    TransportError,
    describe,
)
from oncely.core.message import Message, check_message
from oncely.core.waiting import WaitingMessage, queue_named
from oncely.ledger.ledger import Ledger, checked_ledger
from oncely.sources import DrainableSource, Source, without_id

_log = EventLog(__name__)

_WAIT_S = 1.0
"""How long to wait for a message, and between two files with few messages: Spark reads thousands
of files slowly."""
_AWAY_S = 1.0
"""The pause before the next attempt while the broker or the ledger is away."""
_FEW = 10
"""A batch with less than this part of the most is small."""


@dataclass
class BridgeReport:
    """What a bridge has done so far."""

    received: int = 0
    stored: int = 0
    error: str | None = None
    """Why it cannot go on at the moment: the broker or the ledger is away."""


OnProgress = Callable[[BridgeReport], None]


def bridge(
    source: Source,
    ledger: Ledger | None = None,
    queue: str = "orders",
    *,
    files: str | Path | None = None,
    batch: int = 1_000,
    stop: threading.Event | None = None,
    drain: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> BridgeReport:
    """Move messages from `source` into `queue` of the ledger's database, where a Consumer takes
    them; or, without a ledger, into the folder `files`. Until `stop` is set or, to `drain`, the
    source is empty. The source stays open.

    A batch is acknowledged when it is committed or, in a folder, on the disk, each batch as one
    file of JSON lines. If the process dies between the two, the batch is received and stored again:
    the ledger of whoever handles the messages knows their ids. Messages that cannot be read, and
    those without an id, are moved, too.

    While the broker or the ledger is away, or the disk is full, the bridge tries again. Raises
    TransportError if the source was never reached, StoreError if the ledger is away at the start
    or refuses a batch, and ConfigError for settings that make no sense.
    """
    if type(batch) is not int or batch < 1:
        raise ConfigError(f"batch: {batch!r} is not a whole number of 1 or more")
    if (ledger is None) is (files is None):
        raise ConfigError("bridge: name one place for the messages: a ledger, or files=FOLDER")
    prepare = _into_queue(ledger, queue) if files is None else _into_folder(files)
    moving = _Bridge(source, prepare, batch, rests=files is not None and not drain)
    return moving.run(stop or threading.Event(), on_progress, drains=drain)


Prepare = Callable[[Sequence[Message]], Callable[[], object]]
"""Returns what stores these messages, and may be called again after it has failed."""


@dataclass
class _Bridge:
    source: Source
    prepare: Prepare
    batch: int
    _: KW_ONLY
    rests: bool
    """Whether there is a pause after a small batch."""

    def __post_init__(self) -> None:
        self._report = BridgeReport()
        self._was_reached = False
        self._store: Callable[[], object] | None = None
        """Stores the batch in hand: received, and not stored yet."""

    def run(self, stop: threading.Event, on_progress: OnProgress, *, drains: bool) -> BridgeReport:
        """As `bridge`. The batch in hand survives what passes."""
        report = self._report
        outage = Outage(
            _log,
            "bridge_stalled",
            "the bridge cannot go on: %(reason)s; trying again",
            "bridge_recovered",
            "the bridge goes on after %(away_s)s s",
        )
        while not stop.is_set():
            try:
                moved = self._go_on()
                if not moved and drains and self._is_drained():
                    break
            except (TransportError, StoreUnavailable, ContentionError) as error:
                if not self._was_reached:
                    raise
                outage.met(error)
                report.error = describe(error)
                stop.wait(_AWAY_S)
            else:
                outage.over()
                report.error = None
                if self.rests and 0 < moved * _FEW < self.batch:
                    stop.wait(_WAIT_S)
            on_progress(report)
        return report

    def _go_on(self) -> int:
        """Move a batch, the one in hand first; return how many messages it had."""
        report = self._report
        if self._store is None:
            messages = self.source.receive(self.batch, _WAIT_S)
            self._was_reached = True
            if not messages:
                return 0
            report.received += len(messages)
            reached("bridge_received")
            self._store = self.prepare(messages)
        self._store()
        self._store = None
        count, report.stored = report.received - report.stored, report.received
        reached("bridge_stored")
        try:
            self.source.acknowledge()
        except (TransportError, BrokerRefused) as error:
            _log.warning(
                "%(count)s messages are stored, and could not be acknowledged: %(reason)s; they "
                "are received again",
                error=error,
                extra={"event": "acknowledgements_lost", "count": count},
            )
        reached("bridge_acknowledged")
        return count

    def _is_drained(self) -> bool:
        return not isinstance(self.source, DrainableSource) or self.source.is_drained()


# ---- Into a ledger -------------------------------------------------------------------------------


def _into_queue(ledger: Ledger | None, queue: str) -> Prepare:
    ledger = checked_ledger(ledger)
    if not ledger.can_defer:
        raise ConfigError(
            "bridge: this ledger keeps no queues; write open_ledger with the URL of a database, "
            'such as "postgresql://user@host/database"'
        )
    try:
        inner = queue_named(queue)
    except MessageError as error:
        raise ConfigError(f"{error}; write a shorter name") from None
    ledger.check_privileges("worker")
    # If it is away, or has no tables, that is reported before any message is taken.
    ledger.mailbox.free_in_s(inner)
    ledger.recorder.works_as("bridge")

    def prepare(messages: Sequence[Message]) -> Callable[[], object]:
        # Their names make it safe to store them again, when the reply to a commit was lost.
        rows = WaitingMessage.queued(queue, [_storable(message) for message in messages])
        return partial(ledger.mailbox.keep, rows)

    return prepare


def _storable(message: Message) -> Message:
    try:
        return check_message(message, needs_id=False)
    except MessageError as error:
        return without_id(message, str(error))


# ---- Into files ----------------------------------------------------------------------------------


def _into_folder(files: str | Path) -> Prepare:
    if "://" in str(files):
        raise ConfigError(f"files: {str(files)!r} is not a folder that this machine has mounted")
    folder = Path(files).absolute()
    try:
        # With its parents, so that they survive a power failure.
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            _sync(each.parent)
    except OSError as error:
        raise ConfigError(f"files: {str(folder)!r} cannot be made: {error.strerror}") from error

    def prepare(messages: Sequence[Message]) -> Callable[[], object]:
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid4().hex[:12]}.jsonl"
        lines = "".join(f"{json.dumps(_row(message))}\n" for message in messages)
        return partial(_write, folder, name, lines)

    return prepare


def _write(folder: Path, name: str, lines: str) -> None:
    """Write a file that nobody sees before it is whole and on the disk. Raises StoreUnavailable."""
    hidden = folder / f".{name}"
    try:
        with hidden.open("w", encoding="ascii") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        reached("bridge_written")
        hidden.rename(folder / name)
        _sync(folder)
    except OSError as error:
        with suppress(OSError):
            hidden.unlink(missing_ok=True)
        text = f"{str(folder / name)!r} cannot be written: {error.strerror}"
        raise StoreUnavailable(text) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _row(message: Message) -> dict[str, Any]:
    """The line of a message, with the columns of a message DataFrame. JSON holds text alone: a body
    that is not UTF-8 is in a field of its own.
    """
    try:
        body = {"body": message.body.decode()}
    except UnicodeDecodeError:
        body = {"body_base64": b64encode(message.body).decode()}
    return {
        "id": message.id or None,
        "type": message.type or None,
        **body,
        "headers": dict(message.headers),
        "source": message.source or None,
        "time": _time(message.time),
        "key": message.key,
    }


def _time(time: datetime | None) -> str | None:
    """The time in UTC; None if UTC's calendar does not have it."""
    if time is None:
        return None
    try:
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    except OverflowError:
        return None
