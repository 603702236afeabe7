"""The properties of messages in AMQP's wire format: reads whatever a client has written.

Pika's own reader ends the connection for values that it does not know, and truncates floats.
"""

import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
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
"""The properties in their order on the wire; the first has the highest flag."""
_TEXTS = frozenset(_NAMES) - {"headers", "delivery_mode", "priority", "timestamp"}
_FLAGS = {name: 1 << (15 - index) for index, name in enumerate(_NAMES)}
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
"""The types of values, as RabbitMQ reads them."""


def decode_properties(data: bytes) -> tuple[dict[str, Any], str | None]:
    """The properties that are there and can be read, by their names, and what is wrong with the
    others, if anything.

    Text that is not UTF-8 becomes bytes; in a header's name it is escaped. The rest of headers
    that cannot be read is in a header of its own, in hexadecimal digits.
    """
    properties: dict[str, Any] = {}
    reader = _Reader(data)
    problem = None
    try:
        for name in _present(reader.whole(2)):
            if name in _TEXTS:
                properties[name] = reader.text(reader.byte())
            elif name == "headers":
                properties[name], problem = _headers(reader)
            else:
                properties[name] = reader.whole(8) if name == "timestamp" else reader.byte()
    except _UnreadableError as error:
        problem = f"a property of AMQP cannot be read: {error}"
    return properties, problem


@cache
def _present(flags: int) -> Sequence[str]:
    """The properties that these flags announce."""
    return [name for name, flag in _FLAGS.items() if flags & flag]


def _headers(reader: "_Reader") -> tuple[dict[str, Any], str | None]:
    # A reader of its own: if it fails, the properties after the headers can still be read.
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
    """Properties encoded for the wire. Raises MessageError for what does not fit into AMQP."""

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
        """The pieces that pika sends; pika adds to the list."""
        return [*self._pieces]


class _UnreadableError(Exception):
    """The bytes are not AMQP."""


class _Reader:
    def __init__(self, data: bytes, depth: int = 0) -> None:
        self._data = data
        self._at = 0
        self._depth = depth

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        """The next unsigned integer of one byte."""
        at = self._at
        if at >= len(self._data):
            raise _UnreadableError("it breaks off")
        self._at = at + 1
        return self._data[at]

    def whole(self, size: int) -> int:
        """The next unsigned integer, of so many bytes."""
        return int.from_bytes(self.take(size))

    def take(self, size: int) -> bytes:
        """The next bytes."""
        start = self._at
        self._at = end = start + size
        if end > len(self._data):
            raise _UnreadableError("it breaks off")
        return self._data[start:end]

    def text(self, size: int) -> str | bytes:
        """The next text; bytes if it is not text."""
        data = self.take(size)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def rest(self) -> bytes:
        """The bytes from the beginning of the last field on."""
        return self._data[self._field_at :]

    def field(self, into: dict[str, Any]) -> None:
        """The next field of a table."""
        self._field_at = self._at
        name = self.take(self.byte()).decode(errors="backslashreplace")
        into[name] = self._value()

    def _value(self) -> Any:
        kind = self.byte()
        if kind == _TEXT:
            return self.text(self.whole(4))
        if form := _NUMBERS.get(kind):
            return form.unpack(self.take(form.size))[0]
        match chr(kind):
            case "x":
                return self.take(self.whole(4))
            case "t":
                return bool(self.byte())
            case "V":
                return None
            case "T":
                number = self.whole(8)
                moment = moment_of(number)
                return number if moment is None else moment.isoformat()
            case "D":
                indexes = self.byte()
                return Decimal(int.from_bytes(self.take(4), signed=True)).scaleb(-indexes)
            case "F" | "A":
                return self._nested(is_table=kind == ord("F"))
        raise _UnreadableError(f"a field of the unknown type {chr(kind)!r}")

    def _nested(self, *, is_table: bool) -> Any:
        if self._depth == _DEEPEST:
            raise _UnreadableError(f"tables are nested more than {_DEEPEST} deep")
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
    """The time of a timestamp in seconds, or in milliseconds if seconds would be out of range."""
    for seconds in (number, number / 1_000):
        try:
            return datetime.fromtimestamp(seconds, UTC)
        except (ValueError, OverflowError, OSError):
            continue
    return None
