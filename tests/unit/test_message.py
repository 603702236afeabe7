"""Messages: which ids are usable, what a body is as JSON, and the idempotency key."""

from typing import Any
from uuid import UUID

import pytest
from tests.conformance.values import DISTINCT_IDS
from tests.records import record_of

from oncely.barrier import idempotent_consumer, message_context
from oncely.core.errors import MessageError
from oncely.core.ids import MAX_ID_LENGTH, check_id
from oncely.core.message import Message
from oncely.core.record import Key, idempotency_key
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.work import claimed
from oncely.once import once
from oncely.repository import ProcessedMessageRepository

BAD_IDS: list[tuple[Any, str]] = [
    (None, "missing"),
    ("", "empty"),
    (" ", "empty"),
    ("\t\n\r", "empty"),
    ("\u2003\u00a0", "empty"),
    (7, "not a string"),
    (b"abc", "not a string"),
    (1.5, "not a string"),
    (True, "not a string"),
    (["a"], "not a string"),
    ({"id": "a"}, "not a string"),
    ("a\0b", "NUL"),
    ("\0", "NUL"),
    ("a\ud800", "surrogate"),
    ("\udfff", "surrogate"),
    ("x" * (MAX_ID_LENGTH + 1), "too long"),
    ("🧾" * (MAX_ID_LENGTH + 1), "too long"),
    ("x" * 10_000_000, "too long"),
]
HALVES = ["consumer", "message_id"]


@pytest.mark.parametrize(("value", "reason"), BAD_IDS, ids=lambda value: ascii(value)[:20])
def test_bad_ids(value: Any, reason: str) -> None:
    """What cannot identify a message is refused, with a short reason that does not repeat it."""
    with pytest.raises(MessageError, match=reason) as caught:
        check_id(value)
    assert len(str(caught.value)) < 60


@pytest.mark.parametrize("value", DISTINCT_IDS, ids=lambda value: ascii(value)[:20])
def test_good_ids(value: str) -> None:
    """Any other string is an id, and stays exactly what it is."""
    assert check_id(value) is value


NUMBERED: list[tuple[Any, str]] = [
    (7, "7"),
    (0, "0"),
    (-1, "-1"),
    (2**63, "9223372036854775808"),
    (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
]


@pytest.mark.parametrize(("given", "text"), NUMBERED, ids=str)
def test_numbers_and_uuids(ledger: Ledger, given: Any, text: str) -> None:
    """A number and a UUID are known by their text at every door that takes a message id."""
    runs = []

    @once(ledger, consumer="once", key=lambda id_: id_)
    def work(id_: Any) -> None:
        runs.append(id_)

    @idempotent_consumer(ledger)
    def consume() -> None:
        runs.append("consumed")

    for id_ in (given, text):
        work(id_)
        with claimed(ledger, Key("claimed", id_)) as block:
            runs += ["claimed"] if block.is_new else []
        with message_context(id_, "queue"):
            consume()
    assert runs == [given, "claimed", "consumed"]
    repository = ProcessedMessageRepository(ledger)
    assert [repository.mark_processing(id_, "sms") for id_ in (given, text)] == [True, False]
    assert Key("billing", given) == Key("billing", text)
    for consumer in ("once", "claimed", "queue", "sms"):
        assert record_of(ledger, Key(consumer, given)).key == (consumer, text)


@pytest.mark.parametrize(
    "given", [True, 7.5, b"7", 10**5_000], ids=["bool", "float", "bytes", "long"]
)
def test_what_is_not_an_id(ledger: Ledger, given: Any) -> None:
    """Nothing else is turned into text."""
    with pytest.raises(MessageError, match="id is not a string"):
        ledger.claim(Key("billing", given))
    assert list(ledger.scan()) == []


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("value", "reason"), BAD_IDS, ids=lambda value: ascii(value)[:20])
def test_ledger_checks_keys(ledger: Ledger, half: str, value: Any, reason: str) -> None:
    """Every door of the ledger that takes a key refuses a bad one, and stores nothing."""
    key = Key("billing", "abc-123")._replace(**{half: value})
    doors = (ledger.claim, ledger.find, ledger.reset, ledger.forget)
    for door in doors:
        with pytest.raises(MessageError, match=reason):
            door(key)
    with pytest.raises(MessageError, match=reason):
        ledger.claim_many([Key("billing", "good"), key])
    assert ledger.counts() == {}


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and cut off": b"[" * 100_000,
    "a million digits": b"1" * 1_000_000,
    "a million digits inside": b'{"n": -' + b"1" * 1_000_000 + b"}",
    "NaN": b'{"n": NaN}',
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "a name twice": b'{"a": 1, "a": 2}',
    "a name twice inside": b'[{"b": {"a": 1, "a": 1}}]',
    "a name twice by escape": b'{"a": 1, "\\u0061": 2}',
    "cut off": b'{"a": [1, 2',
    "cut off string": b'{"a": "b',
    "two values": b"1 2",
    "invalid UTF-8": b'{"a": "\xff"}',
    "overlong UTF-8": b'"\xc0\x80"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "control character": b'"a\x00b"',
    "single quotes": b"{'a': 1}",
    "comment": b"{} // done",
    "trailing comma": b"[1,]",
    "pickle": b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bad_bodies(body: bytes) -> None:
    """A body that is not JSON is refused when it is asked for as JSON, and only then."""
    message = Message("1", body)
    for ask in (message.json, lambda: message.get("a")):
        with pytest.raises(MessageError, match="not JSON"):
            ask()


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}', {"a": [1, 2.5, None, True, "é"]}),
        (b" \n1 ", 1),
        (b"null", None),
        (b'[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        (b"[" * 100 + b"]" * 100, eval("[" * 99 + "[]" + "]" * 99)),  # Nested, and safe to read.
    ],
)
def test_good_bodies(body: bytes, value: Any) -> None:
    """A body that is JSON is read as it is."""
    assert Message("1", body).json() == value


def test_get() -> None:
    """One field of an object; the default only where it is absent. What is JSON but no object has
    no fields.
    """
    message = Message("1", b'{"to": "a", "cc": null}')
    assert message.get("to") == "a"
    assert message.get("cc", "default") is None
    assert message.get("bcc") is None
    assert message.get("bcc", "default") == "default"
    for body in (b"[]", b"1", b'"text"', b"null"):
        with pytest.raises(MessageError, match="not a JSON object"):
            Message("1", body).get("to")


def test_idempotency_keys_differ() -> None:
    """Two ids, two consumers, or another cut between them have different idempotency keys."""
    keys = [Key("a", "b:c"), Key("a:b", "c"), Key("a", "b"), Key('a", "b', "c"), Key("A", "b")]
    assert len({idempotency_key(key) for key in keys}) == len(keys)
