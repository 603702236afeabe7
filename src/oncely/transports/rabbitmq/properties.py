"""The properties of messages as AMQP has them on the wire: read whatever a client has written.

Pika's own reading ends the connection for what it does not know, and cuts floats.
"""

import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pika import BasicProperties

from oncely.core.errors import MessageError

UNREADABLE = "amqp-unreadable"
_DEEPEST = 32
_SHORT = 255
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
_NUMBERS = {
    b"b": ">b",
    b"B": ">B",
    b"U": ">h",
    b"s": ">h",
    b"u": ">H",
    b"I": ">i",
    b"i": ">I",
    b"L": ">q",
    b"l": ">q",
    b"f": ">f",
    b"d": ">d",
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
        flags = reader.number(">H")
        for place, name in enumerate(_NAMES):
            if not flags & (1 << (15 - place)):
                continue
            if name == "headers":
                properties.headers, problem = _headers(reader)
            else:
                setattr(properties, name, _property(reader, name))
    except _UnreadableError as error:
        problem = f"a property of AMQP cannot be read: {error}"
    return properties, problem


def _headers(reader: "_Reader") -> tuple[dict[str, Any], str | None]:
    # Its own reader: where it fails, the properties behind the headers are still found.
    table = _Reader(reader.take(reader.number(">I")))
    headers: dict[str, Any] = {}
    while not table.is_done:
        try:
            table.field(headers)
        except _UnreadableError as error:
            headers[UNREADABLE] = table.rest().hex()
            return headers, f"a header of AMQP cannot be read: {error}"
    return headers, None


def _property(reader: "_Reader", name: str) -> Any:
    if name == "timestamp":
        return reader.number(">Q")
    number = reader.number(">B")
    return reader.text(number) if name in _TEXTS else number


class Encoded(BasicProperties):
    """Properties as they go on the wire. Raises MessageError for what AMQP has no room for."""

    def __init__(self, headers: Mapping[str, str], **others: Any) -> None:
        super().__init__(**others)
        self._headers = headers
        self._pieces = self._encoded()
        self.size = sum(map(len, self._pieces))

    def encode(self) -> list[bytes]:
        """What pika sends. It adds to the list."""
        return [*self._pieces]

    def _encoded(self) -> list[bytes]:
        flags = 0
        pieces = []
        for place, name in enumerate(_NAMES):
            value = self._table() if name == "headers" else getattr(self, name)
            if value is None:
                continue
            flags |= 1 << (15 - place)
            if name == "timestamp":
                pieces.append(struct.pack(">Q", value))
            elif name in _TEXTS:
                pieces.append(_short_text(value))
            else:
                pieces.append(value if name == "headers" else struct.pack(">B", value))
        return [struct.pack(">H", flags), *pieces]

    def _table(self) -> bytes | None:
        if not self._headers:
            return None
        pieces: list[bytes] = []
        for name, value in self._headers.items():
            text = _utf8(value)
            pieces += _short_text(name), struct.pack(">cI", b"S", len(text)), text
        table = b"".join(pieces)
        return struct.pack(">I", len(table)) + table


def _short_text(value: Any) -> bytes:
    text = _utf8(value)
    if len(text) > _SHORT:
        raise MessageError(f"{value[:20]!r}... is longer than the {_SHORT} bytes that AMQP has")
    return struct.pack(">B", len(text)) + text


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise MessageError(f"a property or header that AMQP cannot hold: {error!r:.100}") from error


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

    def number(self, form: str) -> Any:
        """The next number of that form."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if self._at + size > len(self._data):
            raise _UnreadableError("it breaks off")
        self._at += size
        return self._data[self._at - size : self._at]

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
        name = self.take(self.number(">B")).decode(errors="backslashreplace")
        into[name] = self._value()

    def _value(self) -> Any:
        kind = self.take(1)
        if form := _NUMBERS.get(kind):
            return self.number(form)
        match kind:
            case b"S":
                return self.text(self.number(">I"))
            case b"x":
                return self.take(self.number(">I"))
            case b"t":
                return bool(self.number(">B"))
            case b"V":
                return None
            case b"T":
                return _moment(self.number(">Q"))
            case b"D":
                places = self.number(">B")
                return Decimal(self.number(">i")).scaleb(-places)
        return self._nested(kind)

    def _nested(self, kind: bytes) -> Any:
        if kind not in (b"F", b"A"):
            raise _UnreadableError(f"a field of the unknown type {kind!r}")
        if self._depth == _DEEPEST:
            raise _UnreadableError(f"tables stand more than {_DEEPEST} deep in one another")
        inner = _Reader(self.take(self.number(">I")), self._depth + 1)
        table: dict[str, Any] = {}
        values: list[Any] = []
        while not inner.is_done:
            if kind == b"F":
                inner.field(table)
            else:
                values.append(inner._value())
        return table if kind == b"F" else values


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
