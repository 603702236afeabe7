"""CloudEvents as messages: both modes, what is refused, and the identity of (source, id)."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings import amqp, http, kafka
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from oncely.core.errors import MessageError
from oncely.core.ids import MAX_ID_LENGTH, check_id
from oncely.core.message import Message

STRUCTURED = {"content-type": "application/cloudevents+json"}
BINARY = {"ce-specversion": "1.0", "ce-source": "/shop", "ce-id": "17", "ce-type": "paid"}
EVENT = {"specversion": "1.0", "source": "/shop", "id": "17", "type": "paid"}
NOON = datetime(2024, 2, 3, 12, 0, 0, 500_000, tzinfo=UTC)
WRITTEN = {
    **EVENT,
    "id": 'a "quoted" é 🧾 %41 \\',
    "time": NOON,
    "datacontenttype": "application/json",
    "subject": "order 17",
    "partitionkey": "customer-1",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "sequence": 5,
}
READ = Message(
    '["/shop","a \\"quoted\\" é 🧾 %41 \\\\"]',
    type="paid",
    source="/shop",
    time=NOON,
    key="customer-1",
    headers={
        "subject": "order 17",
        "partitionkey": "customer-1",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "sequence": "5",
    },
)


def binary(**attributes: Any) -> Message:
    """The message of an event in HTTP's binary mode; `None` leaves a header out."""
    headers = BINARY | {f"ce-{name}": value for name, value in attributes.items()}
    return Message.from_cloudevent({n: v for n, v in headers.items() if v is not None}, b"{}")


def structured(**members: Any) -> Message:
    """The message of an event in structured mode."""
    return Message.from_cloudevent(STRUCTURED, json.dumps(EVENT | members).encode())


@pytest.mark.parametrize("carrier", [http, kafka, amqp])
@pytest.mark.parametrize("mode", ["binary", "structured"])
def test_round_trips(carrier: Any, mode: str) -> None:
    """What the package writes is read as the same message, whatever carries it and how."""
    event = CloudEvent(dict(WRITTEN), {"amount": 99, "to": "é"})
    sent = getattr(carrier, f"to_{mode}_event")(event)
    if carrier is http:
        headers, body = sent.headers, sent.body
    elif carrier is kafka:
        headers, body = sent.headers, sent.value
    else:
        headers, body = sent.properties | sent.application_properties, sent.application_data
    message = Message.from_cloudevent(headers, body)
    assert replace(message, body=b"") == READ
    assert message.json() == {"amount": 99, "to": "é"}


def test_least_of_an_event() -> None:
    """An event needs four attributes and no data; nothing is made up for what it lacks."""
    expected = Message('["/shop","17"]', type="paid", source="/shop")
    assert Message.from_cloudevent(BINARY, b"") == expected
    assert structured() == expected


def test_names_of_headers() -> None:
    """Names of headers are read in any case; other headers stay out of the message."""
    headers = {name.upper(): value for name, value in BINARY.items()}
    message = Message.from_cloudevent(
        {**headers, "Content-Type": "text/plain", "Host": "shop", "X-CE-ID": "18"}, b"hello"
    )
    assert (message.id, message.content_type, message.headers) == (
        '["/shop","17"]',
        "text/plain",
        {},
    )


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("100%25", "100%"),
        ("Euro%20%E2%82%AC%20%f0%9f%98%80", "Euro € 😀"),
        ("%2541", "%41"),
        (b"%C3%A9", "é"),
        ('"in quotes \\" and \\\\"', 'in quotes " and \\'),
        ('"', '"'),
        ("100%", "100%"),
    ],
)
def test_values_of_http(written: Any, read: str) -> None:
    """Quotes are taken off, then percent signs are decoded, once."""
    assert binary(id=written).id == json.dumps(["/shop", read], ensure_ascii=False).replace(
        '", "', '","'
    )


def test_values_of_kafka_are_as_they_are() -> None:
    """Kafka's headers are UTF-8, in which a percent sign or a quote means itself."""
    headers = {name.replace("-", "_"): value.encode() for name, value in BINARY.items()}
    message = Message.from_cloudevent(headers | {"ce_id": '"%41é'.encode()}, b"")
    assert json.loads(message.id) == ["/shop", '"%41é']


@pytest.mark.parametrize(
    ("members", "body", "content_type"),
    [
        ({"data": {"a": [1, 2.5, "é"]}}, '{"a":[1,2.5,"é"]}'.encode(), "application/json"),
        ({"data": "text"}, b'"text"', "application/json"),
        ({"data": None}, b"null", "application/json"),
        ({"data": {"a": 1}, "datacontenttype": None}, b'{"a":1}', "application/json"),
        ({"data": 1, "datacontenttype": "text/x+JSON; a=b"}, b"1", "text/x+JSON; a=b"),
        ({"data": "<é/>", "datacontenttype": "application/xml"}, "<é/>".encode(), None),
        ({"data": "é", "datacontenttype": 'text/plain; charset="latin-1"'}, b"\xe9", None),
        ({"data_base64": "AP8=", "datacontenttype": "image/png"}, b"\0\xff", None),
        ({"data_base64": None, "data": {}}, b"{}", None),
        ({}, b"", "application/json"),
    ],
)
def test_data_of_structured_mode(
    members: dict[str, Any], body: bytes, content_type: str | None
) -> None:
    """The body is what binary mode would have carried: JSON, text as declared, or bytes."""
    message = structured(**members)
    assert message.body == body
    assert message.content_type == (
        content_type or members.get("datacontenttype", READ.content_type)
    )


def test_body_of_binary_mode_is_left_alone() -> None:
    """In binary mode the body is the data, byte by byte, even where it is not JSON."""
    deep = b"[" * 100_000
    assert Message.from_cloudevent(BINARY | {"content-type": "application/json"}, deep).body == deep


def test_attributes_as_headers() -> None:
    """What Message has no field for goes to its headers, as text; what is null is not set."""
    message = structured(subject="s", dataschema="/d", flag=True, count=-3, name="é", none=None)
    assert message.headers == {
        "subject": "s",
        "dataschema": "/d",
        "flag": "true",
        "count": "-3",
        "name": "é",
    }
    assert message.key is None


@pytest.mark.parametrize(
    "time", ["2024-02-03t12:00:00.5z", "2024-02-03t13:00:00.500000000+01:00", NOON, 1706961600500]
)
def test_times(time: Any) -> None:
    """A time has a zone, and is read as text or as AMQP's own types."""
    assert binary(time=time).time == NOON


@pytest.mark.parametrize("read", [binary, structured], ids=["binary", "structured"])
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        *((name, None, f"missing {name}") for name in EVENT),
        *((name, "  ", f"empty {name}") for name in ("source", "id", "type")),
        *((name, "", name) for name in ("source", "id", "type", "subject", "dataschema")),
        ("id", "a\0", "id with NUL"),
        ("id", "\ud800", "id with a lone surrogate"),
        ("id", 17, "id is not a string"),
        ("source", "s" * 65_537, "too long source"),
        ("specversion", "0.3", "specversion"),
        ("specversion", "2.0", "specversion"),
        ("time", "noon", "time is not an RFC 3339 time"),
        ("time", "2024-02-03T12:00:00", "time zone"),
        ("trace_parent", "x", "trace_parent"),
        ("a\nb", "x", "a b"),
    ],
)
def test_wrong_attributes(read: Callable[..., Message], name: str, value: Any, reason: str) -> None:
    """In both modes a wrong attribute is refused, in one line that names it."""
    with pytest.raises(MessageError, match=reason) as caught:
        read(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"content-type": "application/json"}, "missing specversion"),
        (
            {"content-type": "application/cloudevents-batch+json; charset=utf-8"},
            "split it first",
        ),
        (
            {"content-type": "application/cloudevents+avro"},
            "a CloudEvent that is not JSON; send",
        ),
        (BINARY | {"CE-ID": "18"}, "two headers give .id. different values"),
        (BINARY | {"ce_id": b"18"}, "two headers give .id. different values"),
        (
            BINARY | {"content-type": "text/plain", "ce-datacontenttype": "text/html"},
            "two headers give .datacontenttype. different values",
        ),
        (BINARY | {"ce-id": b"\xff"}, "id. is not UTF-8"),
        (BINARY | {"ce-id": "%C0%A0"}, "id. is not UTF-8"),
        (BINARY | {"content-type": ""}, "datacontenttype"),
        (BINARY | {"cloudEvents_time": 10**18}, "time is out of range"),
        (BINARY | {"ce-data": "x"}, "data"),
        (BINARY | {"cloudEvents_x": object()}, "cannot hold"),
    ],
)
def test_wrong_headers(headers: dict[str, Any], reason: str) -> None:
    """Headers that are no CloudEvent's, or say two things, are refused."""
    with pytest.raises(MessageError, match=reason):
        Message.from_cloudevent(headers, b"")


WRONG_DATA: list[tuple[dict[str, Any], str]] = [
    ({"data": 1, "data_base64": "MQ=="}, "both data and data_base64"),
    ({"data": None, "data_base64": "MQ=="}, "both data and data_base64"),
    ({"data_base64": "M!Q=="}, "not base64"),
    ({"data_base64": "MQ"}, "not base64"),
    ({"data_base64": "é"}, "not base64"),
    ({"data_base64": 1}, "not base64"),
    ({"data": {}, "datacontenttype": "text/plain"}, "data is not text"),
    (
        {"data": "é", "datacontenttype": "text/plain; charset=ascii"},
        "the charset of datacontenttype",
    ),
    (
        {"data": "é", "datacontenttype": "text/plain; charset=none"},
        "the charset of datacontenttype",
    ),
    ({"data": "\ud800"}, "cannot hold"),
    ({"data": "\ud800", "datacontenttype": "text/plain"}, "the charset of datacontenttype"),
]
"""That cannot become bytes, or stands there twice."""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not JSON"),
        (json.dumps(EVENT).encode()[:-1], "not JSON"),
        (b'{"id": "\xff"}', "not JSON"),
        (json.dumps(EVENT).encode()[:-1] + b', "id": "18"}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "a CloudEvent is a JSON object"),
        (b"1", "a CloudEvent is a JSON object"),
        (json.dumps({**EVENT, "time": 1}).encode(), "time is not an RFC 3339 time"),
        (json.dumps({**EVENT, "datacontenttype": 7}).encode(), "datacontenttype"),
        (json.dumps(EVENT).encode()[:-1] + b', "data": 1e999}', "cannot hold"),
        *((json.dumps(EVENT | members).encode(), reason) for members, reason in WRONG_DATA),
    ],
)
def test_wrong_bodies(body: bytes, reason: str) -> None:
    """A body that is not an event in JSON is refused, as is a number that would be Infinity."""
    with pytest.raises(MessageError, match=reason):
        Message.from_cloudevent(STRUCTURED, body)


def is_read_or_refused(headers: Mapping[str, Any], body: bytes) -> bool:
    """Whether there is a message with a usable id, or an error of one line."""
    try:
        message = Message.from_cloudevent(headers, body)
    except MessageError as error:
        return len(str(error).splitlines()) == 1
    return check_id(message.id) == message.id


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
NAMES = st.sampled_from([*WRITTEN, "data", "data_base64", "dataschema"]) | st.text()


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_structured_mode_raises_nothing_else(members: dict[str, Any]) -> None:
    """Any JSON object is an event or a MessageError of one line."""
    assert is_read_or_refused(STRUCTURED, json.dumps(EVENT | members).encode())


@given(
    st.dictionaries(
        NAMES, st.text() | st.binary() | st.integers() | st.booleans() | st.datetimes(), max_size=4
    ),
    st.sampled_from(["ce-", "ce_", "cloudEvents:"]),
    st.text() | st.none(),
)
def test_binary_mode_raises_nothing_else(
    attributes: dict[str, Any], prefix: str, content_type: str | None
) -> None:
    """Any headers are an event or a MessageError of one line."""
    headers = BINARY | {f"{prefix}{name}": value for name, value in attributes.items()}
    assert is_read_or_refused(headers | {"content-type": content_type}, b"")


HALVES = st.text(alphabet='",[]\\ ab:%é', min_size=1, max_size=6).filter(str.strip)


@given(HALVES, HALVES, HALVES, HALVES)
def test_identities(source: str, event_id: str, other_source: str, other_id: str) -> None:
    """Two pairs have one message id exactly if they are equal, in whichever mode they come."""
    first = structured(source=source, id=event_id).id
    headers = {"ce_specversion": "1.0", "ce_type": "paid"}
    other = Message.from_cloudevent(
        headers | {"ce_source": other_source.encode(), "ce_id": other_id}, b""
    ).id
    assert (first == other) == ((source, event_id) == (other_source, other_id))
    assert first == structured(source=source, id=event_id, type="other", data=[1]).id


def test_long_pairs() -> None:
    """A pair too long for an id has its digest as one; one that just fits stays readable."""
    room = MAX_ID_LENGTH - len('["/shop",""]')
    fits, long, longer = (structured(id="🧾" * length).id for length in (room, room + 1, 9_999))
    assert (len(fits), json.loads(fits)) == (MAX_ID_LENGTH, ["/shop", "🧾" * room])
    assert re.fullmatch("sha256:[0-9a-f]{64}", long)
    assert len({fits, long, longer, structured(source="/shop2", id="🧾" * 9_999).id}) == 4
    assert long == structured(id="🧾" * (room + 1)).id
