"""The bridge: moves the messages of a source into a queue of a ledger, or into files for Spark."""

import json
import os
import threading
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
    StoreError,
    StoreUnavailable,
    TransportError,
    describe,
    reason_of,
)
from oncely.core.message import Message, check_message
from oncely.core.waiting import WaitingMessage, queue_named
from oncely.ledger.ledger import Ledger, checked_ledger
from oncely.ledger.mailbox import LedgerMailbox
from oncely.sources import Source, without_id
from oncely.stores.refusing import refused_of

_log = EventLog(__name__)

_MOST = 1_000
"""Messages in a batch."""
_FEW = 100
_WAIT_S = 1.0
"""How long to wait for a message, for whoever is away, and after a file with few messages: Spark
reads thousands of small files slowly."""

Store = Callable[[Sequence[Message]], None]

_PASSING = (TransportError, StoreUnavailable, ContentionError)
"""What is over when it is tried again for long enough."""


@dataclass
class BridgeReport:
    """What a bridge has done so far."""

    stored: int = 0
    error: str | None = None
    """Why it cannot go on at the moment: the broker or the ledger is away."""


def bridge(
    source: Source,
    ledger: Ledger | None = None,
    queue: str = "orders",
    *,
    files: str | Path | None = None,
    stop: threading.Event | None = None,
    drain: bool = False,
    on_progress: Callable[[BridgeReport], None] = lambda _: None,
) -> BridgeReport:
    """Move messages from `source` into `queue` of the ledger's database, where a Consumer takes
    them; or, without a ledger, into the folder `files`. Until `stop` is set or, to `drain`, the
    source is empty. The source stays open.

    A batch is acknowledged when it is committed or, in a folder, on the disk, each batch as one
    file of JSON lines. If the process dies between the two, the batch is received and stored again:
    the ledger of whoever handles the messages knows their ids. Messages that cannot be read, and
    those without an id, are moved, too; so is one that the ledger refuses, such as for a letter
    that its database lacks: without an id, and with the reason.

    If the broker or the ledger goes away, or the disk is full, the bridge tries again. Raises
    TransportError or StoreError if that is so at the start, StoreError for a message that the
    ledger refuses even so, when the others of its batch are stored, and ConfigError for settings
    that make no sense.
    """
    if (ledger is None) is (files is None):
        raise ConfigError("bridge: name one place for the messages: a ledger, or files=FOLDER")
    store = _into_queue(ledger, queue) if files is None else _into_folder(files)
    is_drained = getattr(source, "is_drained", lambda: True)
    stop, report, has_begun = stop or threading.Event(), BridgeReport(), False
    batch: Sequence[Message] = ()
    outage = Outage(
        _log,
        "bridge_stalled",
        "the bridge cannot go on: %(reason)s; trying again",
        "bridge_recovered",
        "the bridge goes on after %(away_s)s s",
    )
    while not stop.is_set():
        try:
            # After an error the batch is still in hand.
            batch = batch or source.receive(_MOST, _WAIT_S)
            if batch:
                reached("bridge_received")
                store(batch)
                reached("bridge_stored")
            elif drain and is_drained():
                break
        except _PASSING as error:
            if not has_begun:
                raise
            outage.met(error)
            report.error = describe(error)
            stop.wait(_WAIT_S)
        else:
            if batch:
                _acknowledge(source, len(batch))
            outage.over()
            report.error, has_begun = None, True
            report.stored += len(batch)
            if files is not None and not drain and 0 < len(batch) < _FEW:
                stop.wait(_WAIT_S)
            batch = ()
        on_progress(report)
    return report


def _acknowledge(source: Source, count: int) -> None:
    try:
        source.acknowledge()
    except (TransportError, BrokerRefused) as error:
        _log.warning(
            "%(count)s messages are stored, and could not be acknowledged: %(reason)s; they are "
            "received again",
            error=error,
            extra={"event": "acknowledgements_lost", "count": count},
        )
    reached("bridge_acknowledged")


def _into_queue(ledger: Ledger | None, queue: str) -> Store:
    ledger = checked_ledger(ledger)
    if not ledger.can_defer:
        raise ConfigError("bridge: this ledger keeps no queues; open one in a SQL database")
    try:
        inner = queue_named(queue)
    except MessageError as error:
        raise ConfigError(f"{error}; write a shorter name") from None
    ledger.check_privileges("worker")
    ledger.recorder.works_as("bridge")
    # If it is away, or has no tables, that is reported before any message is taken.
    ledger.mailbox.free_in_s(inner)

    return partial(_keep, ledger.mailbox, queue)


def _keep(mailbox: LedgerMailbox, queue: str, messages: Sequence[Message]) -> None:
    """Put messages into the queue: one that the ledger refuses, without an id. Raises StoreError
    if it refuses that, too; then the others are there.
    """

    def put(batch: Sequence[Message]) -> None:
        mailbox.keep(WaitingMessage.queued(queue, batch))

    storable = [_storable(each) for each in messages]
    refused = refused_of(put, storable)
    escaped = [_escaped(storable[index], error) for index, error in refused.items()]
    if errors := refused_of(put, escaped):
        raise next(iter(errors.values()))


def _storable(message: Message) -> Message:
    try:
        return check_message(message, needs_id=False)
    except MessageError as error:
        return without_id(message, str(error))


def _escaped(message: Message, refusal: StoreError) -> Message:
    """A message without an id, as a database of any encoding can hold it: its headers are JSON."""
    bare = without_id(message, reason_of(refusal))
    return replace(
        bare,
        type=_ascii(bare.type),
        source=_ascii(bare.source),
        content_type=_ascii(bare.content_type),
        key=bare.key and _ascii(bare.key),
    )


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


# ---- Into files ----------------------------------------------------------------------------------


def _into_folder(files: str | Path) -> Store:
    folder = Path(files).absolute()
    if "://" in str(files):
        raise ConfigError(f"files: {str(files)!r} is not a folder that this machine has mounted")
    try:
        # With its parents, so that they survive a power failure.
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            _sync(each.parent)
    except OSError as error:
        raise ConfigError(f"files: {str(folder)!r} cannot be made: {error.strerror}") from error

    return partial(_write, folder)


def _write(folder: Path, messages: Sequence[Message]) -> None:
    """Write a file that nobody sees before it is whole and on the disk. Raises StoreUnavailable."""
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid4().hex[:12]}.jsonl"
    hidden = folder / f".{name}"
    try:
        with hidden.open("w", encoding="ascii") as file:
            file.writelines(f"{json.dumps(_row(message))}\n" for message in messages)
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
    """The columns of a message DataFrame. JSON holds text alone: a body that is not UTF-8 has a
    column of its own. A time that UTC's calendar does not have is left out.
    """
    row = {name: getattr(message, name) or None for name in ("id", "type", "source", "key")}
    row |= {"headers": dict(message.headers), "time": None}
    try:
        row["body"] = message.body.decode()
    except UnicodeDecodeError:
        row["body_base64"] = b64encode(message.body).decode()
    if (time := message.time) is not None:
        with suppress(OverflowError):
            at = time if time.tzinfo else time.replace(tzinfo=UTC)
            row["time"] = at.astimezone(UTC).isoformat()
    return row
