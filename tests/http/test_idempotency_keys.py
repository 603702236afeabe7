"""Idempotency keys over HTTP, behind each middleware: what its own code has a part in."""

import asyncio
import base64
import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.http.drivers import Drive, Reply, Shop, asgi_reply, asgi_scope, peak_of, read_all

from oncely.core.errors import MessageError
from oncely.core.json_equality import equal_json
from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.http import HttpAnswer, IdempotencyKey
from oncely.http.header_field import read_key, write_key
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.testing import ManualClock


def test_what_is_of_one_client_is_not_given_again(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """Cookies are neither given to whoever repeats the request, nor stored."""
    shop.answers = [HttpAnswer(201, [("X-Own", "yes"), ("Set-Cookie", "session=1")], b"paid")]
    post = drive()
    assert [post().value_of("Set-Cookie"), post().value_of("Set-Cookie")] == ["session=1", None]
    assert [post().value_of("X-Own"), post().value_of("Idempotent-Replayed")] == ["yes", "true"]
    record = ledger.find(Key("api", "POST /orders  k"))
    assert record is not None
    assert "session" not in str(record.result)
    assert base64.b64encode(b"session").decode() not in str(record.result)


def test_what_is_kept_is_not_compressed(drive: Drive, shop: Shop) -> None:
    """The application is not told that its client would accept that: whoever repeats may not."""
    post, accepting = drive(), [("Accept-Encoding", "gzip")]
    for fields, is_replayed in ((accepting, False), ((), True)):
        assert post(fields=fields).is_replayed == is_replayed
    assert post(None, fields=accepting).status == 201
    assert [asked.accepts for asked in shop.asked] == ["", "gzip"]


def test_a_large_answer_passes_through(drive: Drive, shop: Shop) -> None:
    """It is not kept: a repetition does not run, and is told so."""
    shop.answers = [HttpAnswer(201, body=b"x" * 1025)]
    post = drive(max_body="1KiB")
    assert post().body == b"x" * 1025
    answer = post()
    assert (answer.status, answer.json()["code"]) == (409, "idempotency_answer_not_kept")
    assert "larger" in answer.json()["detail"]
    assert shop.calls == 1


def test_a_large_request(drive: Drive, shop: Shop) -> None:
    """A request's body may be larger than an answer that is kept: the application has it whole."""
    post = drive(max_body="1KiB")
    body = bytes(range(256)) * 5_000
    assert [post(body=body).status for _ in range(2)] == [201, 201]
    assert post(body=body[:-1]).status == 422
    assert [asked.body for asked in shop.asked] == [body]


@pytest.mark.parametrize(
    ("policy", "status", "code"),
    [
        (Policy(on_in_doubt="retry"), 201, None),
        (Policy(on_in_doubt="hold"), 409, "idempotency_in_doubt"),
        (Policy(on_in_doubt="dead_letter"), 409, "idempotency_failed"),
    ],
)
def test_in_doubt(
    drive: Drive, ledger: Ledger, clock: ManualClock, policy: Policy, status: int, code: str | None
) -> None:
    """After a crash of the server the policy says whether the request runs again."""
    ledger.claim(Key("api", "POST /orders  k"), "1m")
    clock.advance(61)
    answer = drive(policy=policy)()
    assert answer.status == status
    assert code is None or answer.json()["code"] == code


def test_what_does_not_run_again(drive: Drive, shop: Shop) -> None:
    """Where a failed request is not to run again, a repetition is told that it has failed."""
    shop.answers = [HttpAnswer(500)]
    post = drive(policy=Policy(on_failed="skip"))
    assert post().status == 500
    answer = post()
    assert (answer.status, answer.json()["code"]) == (409, "idempotency_failed")
    assert shop.calls == 1


# ---- Properties ----------------------------------------------------------------------------------

printable = some.text(some.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1)


keys = printable.filter(lambda text: text.strip() and len(text) <= 255)


@given(keys)
def test_a_key_is_read_as_it_was_written(key: str) -> None:
    """Whatever is in it."""
    assert read_key([write_key(key)]) == key
    assert read_key([f"  {write_key(key)};a=1; b=?0;c "]) == key


@given(some.text(), some.booleans())
def test_any_field(value: str, takes_bare: bool) -> None:
    """It is a key, or it is refused."""
    try:
        key = read_key([value], takes_bare=takes_bare)
    except MessageError:
        return
    assert key is not None
    assert 0 < len(key) <= 255


json_values = some.recursive(
    some.none() | some.booleans() | some.integers(-99, 99) | some.text(max_size=3),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values, json_values)
def test_bodies_that_are_equal_as_json(one: Any, other: Any) -> None:
    """Only those are the same."""
    spaced = json.dumps(one, indent=3).encode()
    assert equal_json(spaced) == equal_json(json.dumps(one, separators=(",", ":")).encode())
    same = equal_json(spaced) == equal_json(json.dumps(other).encode())
    assert same == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


@dataclass(frozen=True)
class Field:
    """A header field, and the key that it means; bare: only where bare keys are taken."""

    value: bytes | None
    means: str | None = None
    is_bare: bool = False


WORDS = [*(b"", b'""', b'"  "', b'"', b'"a', b'a"', b'"a" "b"', b'"a","b"', b'"a\\x"', b"a b")]
WORDS += [*(b"a,b", b"a\\", b'"a";', b'"a";B', b'"a\tb"', b'("a" "b")', b"k" * 256)]
FIELDS = some.one_of(
    some.just(Field(None)),
    some.builds(
        lambda text, end: Field(f"{write_key(text)}{end}".encode(), text),
        keys,
        some.sampled_from(["", " ", ";a", "; b=1; c=?0", ';d="x"']),
    ),
    some.uuids().map(lambda uuid: Field(f"{uuid}".encode(), f"{uuid}", is_bare=True)),
    some.sampled_from(WORDS).map(Field),
    some.binary(min_size=1).map(lambda value: Field(bytes(each | 0x80 for each in value))),
)
AS_THE_DRAFT = {"bare_keys": False}
AS_STRIPE = {"keep_4xx": True, "keep_5xx": True, "required": True}
SAME = object()


@pytest.mark.parametrize("options", [AS_THE_DRAFT, AS_STRIPE])
@given(FIELDS, json_values, json_values | some.just(SAME), some.sampled_from([201, 204, 303, 402]))
def test_any_request(
    options: dict[str, Any], field: Field, value: Any, other: Any, status: int
) -> None:
    """Whatever is asked under whatever key, at once and again: all are refused alike, or a handler
    that has answered well runs once, and its answer is given again byte for byte.
    """
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_all(receive)
        runs.append(status)
        run = [(b"x-run", b"%d" % len(runs))]
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": status, "headers": run})
        await send({"type": "http.response.body", "body": b"" if status == 204 else b"\xff\0"})

    async def ask(body: str) -> Reply:
        scope = asgi_scope("POST", "/orders", "", [])
        if field.value is not None:
            scope["headers"] = [(b"idempotency-key", field.value)]
        return await asgi_reply(keyed, scope, body.encode())

    async def ask_all() -> list[Reply]:
        body = json.dumps(value)
        first = await asyncio.gather(ask(body), ask(body))
        last = json.dumps(value if other is SAME else other, sort_keys=True, indent=2)
        return [*first, await ask(body), await ask(last)]

    with closing(open_ledger("memory://")) as ledger:
        keyed = IdempotencyKey(app, ledger, consumer="api", **options)
        *equal, last = asyncio.run(ask_all())
    told = [each.json()["code"] if each.value_of("Content-Type") else "" for each in equal]
    if field.value is None and options == AS_THE_DRAFT:
        assert [told, len(runs)] == [[""] * 3, 4]
    elif field.means is None or (field.is_bare and options == AS_THE_DRAFT):
        code = "idempotency_key_required" if field.value is None else "idempotency_key_invalid"
        assert [told, last.json()["code"], runs] == [[code] * 3, code, []]
    elif status < 400 or options == AS_STRIPE:
        answers = [each for each, code in zip(equal, told, strict=True) if not code]
        [first] = [each for each in answers if not each.is_replayed]
        assert {*told} <= {"", "idempotency_in_flight"}
        assert [equal[-1].is_replayed, len(runs)] == [True, 1]
        assert [each.own for each in answers] == [first.own] * len(answers)
        is_same = other is SAME or equal_json(json.dumps(value).encode()) == equal_json(
            json.dumps(other).encode()
        )
        assert last.status == (status if is_same else 422)
    else:
        assert not any(each.is_replayed for each in [*equal, last])


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (b"1", b"1.0", True),
        (b"100", b"1e2", True),
        (b"-0", b"0.00", True),
        (b"0.1", b"0.10", True),
        (b'"\\u00e9"', '"é"'.encode(), True),
        (b"0.1", b"0.1000000000000000000001", False),
        (b"12345678901234567890.1", b"12345678901234567890.2", False),
        (b"1", b'"1"', False),
        (b'{"a": null}', b"{}", False),
        (b"[1, 2]", b"[2, 1]", False),
        (b"1", b'{"": [0, "1", 0]}', False),
        (b'{"a": 1, "a": 1}', b'{"a": 1}', False),
        (b"NaN", b" NaN", False),
        (b"[" * 100_000, b"[" * 100_000, True),
        (b"1e9999999999999999999999", b"1e9999999999999999999999", True),
        (b"0.5", b"0.50000000000000000000", True),
        (b"-0.25", b"-25.0E-2", True),
        (b"123456789012345", b"1.23456789012345e14", True),
        (b"1234567890123450", b"123456789012345e1", True),
        (b"0.0000000000001", b"1e-13", True),
        (b"1e-14", b"1.0e-14", True),
        (b"1e-400", b"0", False),
        (b"1e400", b"1e401", False),
        (b"1e400", b"10e399", True),
        (b"1e300", b"1.0000000000000000e300", True),
        (b"9e299", b"900000e294", True),
        (b"1e-14", b"1.1e-14", False),
        (b"9007199254740993", b"9007199254740992", False),
        (b"9999999999999.5", b"9999999999999.6", False),
        (b"1", b"-1", False),
        (b"\xff", b"\xff ", False),
    ],
)
def test_equal_json(one: bytes, other: bytes, are_equal: bool) -> None:
    """Numbers are compared by what they are; what is not JSON, by its bytes."""
    assert (equal_json(one) == equal_json(other)) is are_equal


@pytest.mark.parametrize("body", [b"[" + b"0," * 500_000 + b"0]", b"[" + b"1e9," * 250_000 + b"0]"])
def test_a_body_of_many_numbers_is_cheap_to_compare(body: bytes) -> None:
    """A megabyte of the smallest values takes no more memory than reading it does."""
    _, peak = peak_of(lambda: equal_json(body))
    assert peak < 30 * len(body)
