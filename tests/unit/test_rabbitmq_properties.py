"""Properties of AMQP, whatever a client has written."""

import pika
import pytest
from tests import amqp
from tests.amqp import Raw, field, long

from oncely.core.errors import MessageError
from oncely.core.message import Message
from oncely.transports.rabbitmq.messages import Arrived, arrived, content_of


def _arrived(properties: pika.BasicProperties) -> Arrived:
    raw = b"".join(properties.encode())
    return arrived(raw, b"{}", redelivered=False, max_bytes=100)


@pytest.mark.parametrize(
    ("written", "headers"),
    [
        (amqp.DOUBLE, {"price": "1.5"}),
        (amqp.NOT_A_NUMBER, {"ratio": "nan"}),
        (amqp.FLOAT, {"rate": "0.25"}),
        (amqp.MILLISECONDS, {"at": "2023-11-14T22:13:20.123000+00:00"}),
        (amqp.NO_TIME, {"never": str(2**63)}),
        (amqp.NESTED, {"in": '{"\\\\xff": true}'}),
        (amqp.DECIMAL, {"sum": "-12.34"}),
        (field(b"n", b"V", b""), {"n": ""}),
        (field(b"b", b"x", long(b"\0\xff")), {"b": "\0\\xff"}),
        (field(b"l", b"A", long(b"b\xff" + b"s\xff\xfe")), {"l": "[-1, -2]"}),
    ],
)
def test_headers(written: bytes, headers: dict[str, str]) -> None:
    """What others write is read, and what stands behind it too."""
    message, problem, _ = _arrived(Raw(written, field(b"z", b"S", long(b"last"))))
    assert message == Message("1", b"{}", headers={**headers, "z": "last"})
    assert problem is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (field(b"q", b"?", b"\1\2"), "a field of the unknown type '?'"),
        (amqp.nested(40), "more than 32 deep"),
        (field(b"q", b"S", b"\0\0\0\x09ab"), "it breaks off"),
    ],
)
def test_unreadable_headers(written: bytes, said: str) -> None:
    """What cannot be read is a problem; all else is there, and so are its bytes."""
    message, problem, _ = _arrived(Raw(amqp.DOUBLE, written))
    assert said in str(problem)
    assert message.id == "1"
    assert message.headers == {"price": "1.5", "amqp-unreadable": written.hex()}


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x80\x00\x09ab", b"\xff\xfe"])
def test_broken_properties(data: bytes) -> None:
    """Properties that break off are a problem, and no error."""
    assert arrived(data, b"", redelivered=False, max_bytes=1).problem


def test_id_that_is_no_text() -> None:
    """Two ids that are not UTF-8 must not become one."""
    assert _arrived(Raw(message_id=b"\xff")).problem == "the message id is not UTF-8"


def test_long_name() -> None:
    """A name of a header that is too long for AMQP is told."""
    with pytest.raises(MessageError, match="longer than the 255 bytes"):
        content_of(Message("1", headers={"n" * 256: ""}))
