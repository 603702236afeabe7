"""Converts messages to and from records of Kafka: a value, a key, headers and a timestamp."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

from oncely.core.cloudevents import fields_of
from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.transports.transport import OURS, check_header, too_large

if TYPE_CHECKING:
    # Spark's tasks read records, too, and have another client.
    from confluent_kafka import Message as Arrived

_ID = "message-id"
_FIELDS = {"type": "type", "source": "source", "content-type": "content_type"}
"""Fields of a message, by the headers that hold them; the header of the id may be chosen."""
_TIME = f"{OURS}time"
_TOMBSTONE = "kafka-tombstone"
"""A header of messages whose record has no value: in a compacted topic, its key is deleted."""

BAD_NAME = "the name of a header is not UTF-8"

_read_headers = methodcaller("headers")
"""Not a method call in Python: that does not always look whether C has raised an error, as it does
for a name that is not UTF-8."""


class Record(NamedTuple):
    """A record, to be published or received. Its timestamp is when it was published, since Kafka
    would delete one with an earlier timestamp before its time; the message's time is a header,
    where its publisher has set one.
    """

    value: bytes | None
    key: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    problem: str | None = None
    """Why it cannot be read."""
    timestamp_ms: int | None = None


def received(arrived: "Arrived") -> Record:
    """The record of any publisher, which can be published again as it is. To be called once: after
    a name that is not UTF-8, the next call for the headers would return what ends the process.
    """
    problem, headers = None, list[tuple[str, Any]]()
    try:
        headers += _read_headers(arrived) or ()
    except (SystemError, UnicodeDecodeError):
        problem = BAD_NAME
    return Record(arrived.value(), arrived.key(), headers, problem, arrived.timestamp()[1])


def published_again(record: Record) -> Record:
    """The record as it is to be published: its timestamp is the message's time, where its publisher
    has set no other.
    """
    time = _time_of(None, record.timestamp_ms)
    # The first header of a name counts: the publisher's, if there is one.
    header = _TIME, time.isoformat().encode() if time else b""
    return record._replace(headers=[*record.headers, header])


def _time_of(told: str | None, timestamp_ms: int | None) -> datetime | None:
    try:
        if told is not None:
            return datetime.fromisoformat(told)
        return None if timestamp_ms is None else datetime.fromtimestamp(timestamp_ms / 1_000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def record_of(message: Message, id_header: str) -> Record:
    """The record to publish for a message. Raises MessageError for what does not fit into Kafka."""
    headers = []
    for header, name in {id_header or _ID: "id", **_FIELDS}.items():
        text = getattr(message, name)
        # If a header of the user's has the name of a field, the first one is the field's.
        if text != getattr(Message(""), name) or header in message.headers:
            headers.append((header, text))
    # Also where there is none: each record has a timestamp.
    headers.append((_TIME, message.time.isoformat() if message.time else ""))
    for name, text in message.headers.items():
        check_header(name)
        if "\0" in name:
            raise MessageError(f"header {name!r}: a name with NUL")
        if name != _TOMBSTONE:
            headers.append((name, text))
    is_tombstone = not message.body and _TOMBSTONE in message.headers
    try:
        return Record(
            None if is_tombstone else message.body,
            None if message.key is None else message.key.encode(),
            [(name, text.encode()) for name, text in headers],
        )
    except UnicodeEncodeError as error:
        raise MessageError(f"text that is not UTF-8: {error.reason}") from error


@cache
def _names_of(id_header: str) -> Mapping[str, str]:
    return {id_header or _ID: "id", _TIME: "time", **_FIELDS}


def message_of(record: Record, id_header: str, max_bytes: int) -> tuple[Message, str | None]:
    """The message of any publisher, and why it cannot be handled. Text that is not UTF-8 is
    escaped, and a time that cannot be understood is left out.
    """
    body, problem = record.value or b"", record.problem
    names, headers = _names_of(id_header), dict[str, str]()
    fields: dict[str, Any] = {}
    for header, raw in record.headers:
        text = raw.decode("utf-8", "backslashreplace") if raw else ""
        name = names.get(header)
        if name is not None and name not in fields:
            fields[name] = text
            if name == "id" and text.encode() != (raw or b""):
                problem = "the message id is not UTF-8"
        elif not header.startswith(OURS):
            headers[header] = text
    if not fields.setdefault("id", "") and "ce_specversion" in headers and not id_header:
        try:
            event = fields_of(headers, body)
            fields |= {name: event[name] for name in ("id", "type", "source")}
        except MessageError as error:
            problem = str(error)
    if record.value is None:
        headers[_TOMBSTONE] = "true"
    time = _time_of(fields.pop("time", None), record.timestamp_ms)
    key = None if record.key is None else record.key.decode(errors="backslashreplace")
    message = Message(body=body, headers=headers, time=time, key=key, **fields)
    return message, problem or too_large(body, max_bytes)
