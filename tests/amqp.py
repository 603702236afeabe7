"""Properties as clients in other languages write them, in bytes."""

import struct

import pika


class Raw(pika.BasicProperties):
    """Headers that are written as they are, behind the message id."""

    def __init__(self, *fields: bytes, message_id: bytes = b"1") -> None:
        super().__init__()
        self._fields = b"".join(fields)
        self._message_id = message_id

    def encode(self) -> list[bytes]:
        flags = struct.pack(">H", self.FLAG_HEADERS | self.FLAG_MESSAGE_ID)
        table = struct.pack(">L", len(self._fields)) + self._fields
        return [flags, table, bytes([len(self._message_id)]), self._message_id]


def field(name: bytes, kind: bytes, value: bytes) -> bytes:
    """A field of a table."""
    return bytes([len(name)]) + name + kind + value


def long(data: bytes) -> bytes:
    """Bytes behind their number: a text, a table or an array."""
    return struct.pack(">L", len(data)) + data


DOUBLE = field(b"price", b"d", struct.pack(">d", 1.5))
NOT_A_NUMBER = field(b"ratio", b"d", struct.pack(">d", float("nan")))
FLOAT = field(b"rate", b"f", struct.pack(">f", 0.25))
MILLISECONDS = field(b"at", b"T", struct.pack(">Q", 1_700_000_000_123))
NO_TIME = field(b"never", b"T", struct.pack(">Q", 2**63))
NESTED = field(b"in", b"F", long(field(b"\xff", b"t", b"\1")))
DECIMAL = field(b"sum", b"D", b"\2" + struct.pack(">l", -1234))


def nested(depth: int) -> bytes:
    """Tables in tables."""
    inner = b""
    for _ in range(depth):
        inner = field(b"t", b"F", long(inner))
    return inner
