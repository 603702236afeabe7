"""Converts messages to and from records of Kafka: a key, a value, headers and a timestamp."""

from datetime import UTC, datetime
from operator import methodcaller
from typing import Any, NamedTuple

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE
from confluent_kafka import Message as Arrived

from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.transports.transport import too_large

_OURS = "x-oncely-"
"""The prefix of oncely's own headers, which are not part of a message."""
_TIME = f"{_OURS}time"
_ID = "message-id"
_TYPE = "type"
_SOURCE = "source"
_CONTENT_TYPE = "content-type"
_TOMBSTONE = "kafka-tombstone"
"""A header of messages whose record has no value: in a compacted topic, its key is deleted."""


_read_headers = methodcaller("headers")
"""Not a method call in Python: that does not always look whether C has raised an error, as it does
for a name that is not UTF-8."""

Headers = list[tuple[str, bytes | None]]


class Record(NamedTuple):
    """A record as it is published. Its timestamp is when: by an earlier one, such as the time of an
    event, Kafka would delete it before its time; by a later one it would refuse it.
    """

    value: bytes | None
    key: bytes | None
    headers: Headers


def headers_of(arrived: Arrived) -> Headers | None:
    """The headers of a record, or None if they cannot be read. To be called once for each: the next
    call would return what ends the process.
    """
    try:
        pairs: list[tuple[str, Any]] = _read_headers(arrived) or []
    except (SystemError, UnicodeDecodeError):
        return None
    return [(name, _bytes(value)) for name, value in pairs]


def record_of(message: Message, id_header: str) -> Record:
    """The record to publish for a message. Raises MessageError for what does not fit into Kafka."""
    # A header of the user's may have the name of a field: the first one is always the field's.
    fields = {
        id_header or _ID: (message.id, ""),
        _TYPE: (message.type, ""),
        _SOURCE: (message.source, ""),
        _CONTENT_TYPE: (message.content_type, Message("").content_type),
        # Also where there is none: each record has a timestamp.
        _TIME: (message.time.isoformat() if message.time else "", None),
    }
    users = {name: text for name, text in message.headers.items() if name != _TOMBSTONE}
    for name in users:
        if name.lower().startswith(_OURS):
            raise MessageError(
                f"header {name!r}: names that begin with {_OURS} are for oncely only"
            )
        if "\0" in name:
            raise MessageError(f"header {name!r}: a name with NUL")
    headers = [(n, value) for n, (value, usual) in fields.items() if value != usual or n in users]
    is_tombstone = not message.body and _TOMBSTONE in message.headers
    try:
        return Record(
            None if is_tombstone else message.body,
            None if message.key is None else message.key.encode(),
            [(name, text.encode()) for name, text in (*headers, *users.items())],
        )
    except UnicodeEncodeError as error:
        raise MessageError(f"text that is not UTF-8: {error.reason}") from error


def copy_of(arrived: Arrived, headers: Headers | None) -> Record:
    """The record that has arrived, to be published unchanged, with its time."""
    headers = headers or []
    if time := _time_of(arrived, dict(headers)):
        headers = [(name, value) for name, value in headers if name != _TIME]
        headers.append((_TIME, time.isoformat().encode()))
    return Record(_bytes(arrived.value()), _bytes(arrived.key()), headers)


def message_of(
    arrived: Arrived, told: Headers | None, id_header: str, max_bytes: int
) -> tuple[Message, str | None]:
    """The message of any publisher, and why it cannot be handled. Text that is not UTF-8 is
    escaped, and fields that cannot be understood are left out.
    """
    fields: dict[str, bytes | None] = {}
    headers: dict[str, str] = {}
    names = {id_header or _ID, _TYPE, _SOURCE, _CONTENT_TYPE, _TIME}
    for name, value in told or ():
        if name in names and name not in fields:
            fields[name] = value
        elif not name.startswith(_OURS):
            headers[name] = _text(value)
    value, key = _bytes(arrived.value()), _bytes(arrived.key())
    if value is None:
        headers[_TOMBSTONE] = "true"

    def field(name: str, event_name: str, usual: str = "") -> str:
        return _text(fields[name]) if name in fields else headers.get(event_name, usual)

    id_ = fields.get(id_header or _ID)
    body = value or b""
    message = Message(
        field(id_header or _ID, "" if id_header else "ce_id"),
        body,
        field(_TYPE, "ce_type"),
        headers,
        field(_SOURCE, "ce_source"),
        _time_of(arrived, fields),
        field(_CONTENT_TYPE, "", Message("").content_type),
        None if key is None else _text(key),
    )
    problem = too_large(body, max_bytes)
    if id_ is not None and not _is_utf8(id_):
        problem = problem or "the message id is not UTF-8"
    if told is None:
        problem = "the name of a header is not UTF-8"
    return message, problem


def _time_of(arrived: Arrived, fields: dict[str, bytes | None]) -> datetime | None:
    try:
        if _TIME in fields:
            text = _text(fields[_TIME])
            return datetime.fromisoformat(text) if text else None
        kind, timestamp_ms = arrived.timestamp()
        if kind == TIMESTAMP_NOT_AVAILABLE or timestamp_ms < 0:
            return None
        return datetime.fromtimestamp(timestamp_ms / 1_000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _bytes(value: object) -> bytes | None:
    return value.encode() if isinstance(value, str) else value  # type: ignore[return-value]


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="backslashreplace")


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
