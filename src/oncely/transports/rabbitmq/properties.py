"""The properties of messages as AMQP has them on the wire: read whatever a client has written.

Pika's own reading ends the connection for what it does not know, and cuts floats.
"""

import struct
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pika import BasicProperties
from pika.exceptions import ShortStringTooLong

from oncely.core.errors import MessageError

UNREADABLE = "amqp-unreadable"
_DEEPEST = 32
_TEXT = ord("S")
_NAMES = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In their order on the wire; the first has the highest flag."""
_TEXTS = frozenset(_NAMES) - {"headers", "delivery_mode", "priority", "timestamp"}
_FLAGS = {name: 1 << (15 - place) for place, name in enumerate(_NAMES)}
_NUMBERS = {
    kind: struct.Struct(form)
    for kinds, form in (
        (b"b", ">b"),
        (b"B", ">B"),
        (b"Us", ">h"),
        (b"u", ">H"),
        (b"I", ">i"),
        (b"i", ">I"),
        (b"Ll", ">q"),
        (b"f", ">f"),
        (b"d", ">d"),
    )
    for kind in kinds
}
"""As RabbitMQ reads them."""


def decode_properties(data: bytes) -> tuple[BasicProperties, str | None]:
    """The properties, and what of them cannot be read, if anything: all others are there.

    Text that is not UTF-8 is bytes, but in a header's name, where it is escaped. What is left of
    headers that cannot be read is in one of its own, in hexadecimal digits.
    """
    properties = BasicProperties()
    reader = _Reader(data)
    problem = None
    try:
        flags = reader.whole(2)
        for name, flag in _FLAGS.items():
            if not flags & flag:
                continue
            if name in _TEXTS:
                setattr(properties, name, reader.text(reader.whole(1)))
            elif name == "headers":
                properties.headers, problem = _headers(reader)
            else:
                setattr(properties, name, reader.whole(8 if name == "timestamp" else 1))
    except _UnreadableError as error:
        problem = f"a property of AMQP cannot be read: {error}"
    return properties, problem


def _headers(reader: "_Reader") -> tuple[dict[str, Any], str | None]:
    # Its own reader: where it fails, the properties behind the headers are still found.
    table = _Reader(reader.take(reader.whole(4)))
    headers: dict[str, Any] = {}
    while not table.is_done:
        try:
            table.field(headers)
        except _UnreadableError as error:
            headers[UNREADABLE] = table.rest().hex()
            return headers, f"a header of AMQP cannot be read: {error}"
    return headers, None


class Encoded(BasicProperties):
    """Properties as they go on the wire. Raises MessageError for what AMQP has no room for."""

    def __init__(self, **properties: Any) -> None:
        super().__init__(**properties)
        try:
            self._pieces = super().encode()
        except ShortStringTooLong as error:
            text = error.args[0][:20].decode(errors="replace")
            raise MessageError(f"{text!r}... is longer than the 255 bytes that AMQP has") from error
        except UnicodeEncodeError as error:
            what = "a property or header that AMQP cannot hold"
            raise MessageError(f"{what}: {error!r:.100}") from error
        self.size = sum(map(len, self._pieces))

    def encode(self) -> list[bytes]:
        """What pika sends. It adds to the list."""
        return [*self._pieces]


class _UnreadableError(Exception):
    """What stands there is no AMQP."""


class _Reader:
    def __init__(self, data: bytes, depth: int = 0) -> None:
        self._data = data
        self._at = 0
        self._depth = depth

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._data)

    def whole(self, size: int) -> int:
        """The next number of 0 or more, in so many bytes."""
        return int.from_bytes(self.take(size))

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start = self._at
        self._at = end = start + size
        if end > len(self._data):
            raise _UnreadableError("it breaks off")
        return self._data[start:end]

    def text(self, size: int) -> str | bytes:
        """The next text; bytes where it is none."""
        data = self.take(size)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def rest(self) -> bytes:
        """From the last field that was begun."""
        return self._data[self._field_at :]

    def field(self, into: dict[str, Any]) -> None:
        """The next field of a table."""
        self._field_at = self._at
        name = self.take(self.whole(1)).decode(errors="backslashreplace")
        into[name] = self._value()

    def _value(self) -> Any:
        kind = self.whole(1)
        if kind == _TEXT:
            return self.text(self.whole(4))
        if form := _NUMBERS.get(kind):
            return form.unpack(self.take(form.size))[0]
        match chr(kind):
            case "x":
                return self.take(self.whole(4))
            case "t":
                return bool(self.whole(1))
            case "V":
                return None
            case "T":
                return _moment(self.whole(8))
            case "D":
                places = self.whole(1)
                return Decimal(int.from_bytes(self.take(4), signed=True)).scaleb(-places)
            case "F" | "A":
                return self._nested(is_table=kind == ord("F"))
        raise _UnreadableError(f"a field of the unknown type {chr(kind)!r}")

    def _nested(self, *, is_table: bool) -> Any:
        if self._depth == _DEEPEST:
            raise _UnreadableError(f"tables stand more than {_DEEPEST} deep in one another")
        inner = _Reader(self.take(self.whole(4)), self._depth + 1)
        table: dict[str, Any] = {}
        values: list[Any] = []
        while not inner.is_done:
            if is_table:
                inner.field(table)
            else:
                values.append(inner._value())
        return table if is_table else values


def moment_of(number: int) -> datetime | None:
    """What a timestamp means: seconds, or, where that would be beyond all years, milliseconds."""
    for seconds in (number, number / 1_000):
        try:
            return datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            continue
    return None


def _moment(number: int) -> str | int:
    moment = moment_of(number)
    return number if moment is None else moment.isoformat()
