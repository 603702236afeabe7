"""Idempotency keys over HTTP, behind each middleware: what its own code has a part in."""

import base64
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.conditions import LIMIT_S
from tests.http.drivers import DRIVES, Asked, Drive, Reply, Shop, drive_by

from oncely.core.errors import ConfigError, MessageError
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.http import HttpAnswer, acp_json
from oncely.http.header_field import read_key, write_key
from oncely.http.json_equality import equal_json
from oncely.ledger import Ledger, open_ledger
from oncely.testing import ManualClock


@pytest.fixture(params=sorted(DRIVES))
def drive(request: pytest.FixtureRequest, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind each middleware in turn."""
    return drive_by(request.param, ledger, shop)


def test_the_first_answer_is_given_again(drive: Drive, shop: Shop) -> None:
    """Status, body and fields of it, but for those that are one client's or one moment's."""
    shop.answers = [HttpAnswer(201, [("X-Own", "yes"), ("Set-Cookie", "session=1")], b"paid")]
    post = drive()
    first, second = post(), post()
    assert (first.status, second.status) == (201, 201)
    assert first.body == second.body == b"paid"
    assert (first.value_of("X-Own"), second.value_of("X-Own")) == ("yes", "yes")
    assert (first.value_of("Set-Cookie"), second.value_of("Set-Cookie")) == ("session=1", None)
    assert not first.is_replayed
    assert second.is_replayed
    assert second.value_of("Idempotent-Replayed") == "true"
    assert shop.calls == 1


def test_any_body(drive: Drive, shop: Shop) -> None:
    """A body comes again as it was, whatever it is."""
    post = drive()
    for number, body in enumerate((b"", bytes(range(256)), "é…".encode(), b"a\0b")):
        shop.answers = [HttpAnswer(201, body=body)]
        assert post(f'"{number}"').body == post(f'"{number}"').body == body


def test_any_status(drive: Drive, shop: Shop) -> None:
    """A status comes again as it was, also where there is no body."""
    post = drive()
    for status in (200, 201, 204, 303):
        shop.answers = [HttpAnswer(status, [("X-Order", "7")], b"" if status == 204 else b"it")]
        first, again = post(f'"{status}"'), post(f'"{status}"')
        assert [again.own, again.is_replayed] == [first.own, True]
    assert shop.calls == 4


def test_what_has_no_key(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """Without a key, and with another method, requests run as if nothing was there."""
    post = drive()
    for _ in range(2):
        assert post(None).status == 201
        assert post(method="PUT").status == 201
    assert shop.calls == 4
    assert ledger.counts() == {}


def test_a_key_is_required(drive: Drive, shop: Shop) -> None:
    """Where it is, a request without one is refused, and told where to read why."""
    answer = drive(required=True, documentation="https://api.test/docs")(None)
    assert answer.status == 400
    assert answer.value_of("Content-Type") == "application/problem+json"
    assert answer.json()["type"] == "https://api.test/docs#key-missing"
    assert "https://api.test/docs" in str(answer.value_of("Link"))
    assert shop.calls == 0


def test_unusable_keys(drive: Drive, shop: Shop) -> None:
    """What is not a string of RFC 8941, or is too long, is refused; and so are two keys."""
    post = drive()
    unusable = ("", '""', '" "', "k1", '"k1', 'k1"', '"a""b"', '"é"', '"a\\b"', '"a",')
    two = [("Idempotency-Key", '"a"'), ("Idempotency-Key", '"b"')]
    answers = [
        *(post(key) for key in (*unusable, f'"{"x" * 256}"')),
        post(None, fields=two),
    ]
    assert {(each.status, each.json()["code"]) for each in answers} == {
        (400, "idempotency_key_invalid")
    }
    assert shop.calls == 0


def test_bare_keys(drive: Drive, shop: Shop) -> None:
    """Where they are taken, a key is the same with quotation marks and without."""
    post = drive(bare_keys=True)
    assert [post(key).status for key in ("k1", '"k1"', " k1", "a,b")] == [201, 201, 201, 400]
    assert shop.calls == 1


def test_another_request_under_a_key(drive: Drive, shop: Shop) -> None:
    """Another body or query is refused; the same body, written otherwise, is not another."""
    post = drive()
    assert post(body=b'{"a": 1, "b": 2.0}').status == 201
    assert post(body=b'{"b":2,"a":1.00}').status == 201
    answer = post(body=b'{"a": 2, "b": 2.0}')
    assert (answer.status, answer.json()["code"]) == (422, "idempotency_conflict")
    assert post(body=b'{"a": 1, "b": 2.0}', query="now").status == 422
    assert shop.calls == 1


def test_each_path_method_and_user_has_its_keys(drive: Drive, shop: Shop) -> None:
    """A key says nothing elsewhere, nor to another user."""
    post = drive(scope=lambda request: request.headers.get("x-user"))
    requests: list[Callable[[], Reply]] = [
        post,
        lambda: post(path="/refund"),
        lambda: post(method="PATCH"),
        lambda: post(fields=[("X-User", "u1")]),
        lambda: post(fields=[("X-User", "u2")]),
        lambda: post('"u2 k"'),
    ]
    for _ in range(2):
        assert [request().status for request in requests] == [201] * 6
    assert shop.calls == 6


def test_at_work(drive: Drive, shop: Shop) -> None:
    """While the first request is at work, a repetition is told to come back."""
    began, may_end = threading.Event(), threading.Event()

    def work(asked: Asked) -> HttpAnswer:
        began.set()
        assert may_end.wait(LIMIT_S)
        return shop(asked)

    post = drive(work)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post)
        assert began.wait(LIMIT_S)
        second = post()
        may_end.set()
        assert first.result(LIMIT_S).status == 201
    assert (second.status, second.json()["code"]) == (409, "idempotency_in_flight")
    assert int(str(second.value_of("Retry-After"))) > 0
    assert post().is_replayed


def test_failed_requests_run_again(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """An answer of 500 and more is not kept; nor is an error."""
    errors: list[Exception] = []

    def handle(asked: Asked) -> HttpAnswer:
        answer = shop(asked)
        if errors:
            raise errors.pop()
        return answer

    post = drive(handle)
    shop.answers = [HttpAnswer(503)]
    assert post().status == 503
    errors.append(ValueError("boom"))
    # Django itself answers 500; elsewhere a server does.
    with suppress(ValueError):
        assert post().status == 500
    record = ledger.find(Key("api", "POST /orders  k"))
    assert record is not None
    assert record.state is State.FAILED
    assert "boom" in (record.error or "")
    shop.answers = []
    assert [post().status for _ in range(2)] == [201, 201]
    assert shop.calls == 3


def test_failures_are_kept(drive: Drive, shop: Shop) -> None:
    """Where that is asked for, answers of 500 and more are kept."""
    shop.answers = [HttpAnswer(503)]
    post = drive(keep_5xx=True)
    assert [post().status for _ in range(2)] == [503, 503]
    assert shop.calls == 1


def test_refused_requests_count_as_never_made(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """After an answer of 400 to 499 the key may be used for a request that is put right."""
    shop.answers = [HttpAnswer(422), HttpAnswer(201)]
    post = drive()
    assert post(body=b"[1]").status == 422
    assert ledger.counts() == {}
    assert post(body=b"[2]").status == 201


def test_refusals_are_kept(drive: Drive, shop: Shop) -> None:
    """Where that is asked for, answers of 400 to 499 are kept, or some."""
    for kept, runs in ((True, 1), ({402}, 2), ({404}, 4)):
        shop.answers = [HttpAnswer(402)]
        post = drive(keep_4xx=kept, consumer=f"keeps {kept}")
        assert [post().status for _ in range(2)] == [402, 402]
        assert shop.calls == runs


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
    """A request's body has no limit: the application has it whole."""
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


def test_the_error_of_the_agentic_commerce_protocol(drive: Drive) -> None:
    """Errors may have another shape."""
    post = drive(required=True, errors=acp_json)
    assert post(None).json() | {"message": ""} == {
        "type": "invalid_request",
        "code": "idempotency_key_required",
        "message": "",
    }


def test_nothing_is_kept_of_credentials(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """What a record holds of an answer has no cookies."""
    shop.answers = [HttpAnswer(201, [("Set-Cookie", "session=1")])]
    drive()()
    record = ledger.find(Key("api", "POST /orders  k"))
    assert record is not None
    assert "session" not in str(record.result)
    assert base64.b64encode(b"session").decode() not in str(record.result)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_bdy": 1}, "max_bdy is not an option"),
        ({"max_body": "much"}, "max_body: 'much' is not a size"),
        ({"methods": "POST"}, "methods: write a list"),
        ({"scope": "user"}, "scope"),
        ({"documentation": "docs"}, "documentation: 'docs' is not a URL"),
        ({"policy": "hold"}, "policy"),
        ({"consumer": ""}, "consumer"),
    ],
)
def test_mistakes(options: Any, text: str) -> None:
    """What cannot be meant is told when the application is made."""
    from oncely.http import WsgiIdempotencyKey

    with pytest.raises(ConfigError, match=text):
        WsgiIdempotencyKey(
            lambda _, __: [], open_ledger("memory://"), **{"consumer": "api", **options}
        )


# ---- Properties ----------------------------------------------------------------------------------

printable = some.text(some.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1)


@given(printable.filter(lambda text: text.strip() and len(text) <= 255))
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
    import json

    spaced = json.dumps(one, indent=3).encode()
    assert equal_json(spaced) == equal_json(json.dumps(one, separators=(",", ":")).encode())
    same = equal_json(spaced) == equal_json(json.dumps(other).encode())
    assert same == (json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True))


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (b"1", b"1.0", True),
        (b"100", b"1e2", True),
        (b"-0", b"0.00", True),
        (b"0.1", b"0.10", True),
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
    tracemalloc.start()
    equal_json(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * len(body)
