"""Idempotency keys over HTTP: what holds of every framework."""

import base64
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tests.http.drivers import Answering, Drive, by_asgi

from oncely.core.errors import ConfigError, MessageError
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.http import acp_json
from oncely.http.header_field import read_key, write_key
from oncely.http.json_equality import equal_json
from oncely.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock


def test_the_first_answer_is_given_again(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Status, body and fields of it, but for those that are one client's or one moment's."""
    post = drive(app, ledger)
    first, second = post(), post()
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content == app.body
    assert (first.headers["x-own"], second.headers["x-own"]) == ("yes", "yes")
    assert ("set-cookie" in first.headers, "set-cookie" in second.headers) == (True, False)
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["idempotent-replayed"] == "true"
    assert len(app.asked) == 1


@pytest.mark.parametrize("body", [b"", bytes(range(256)), "é…".encode(), b"a\0b"])
def test_any_body(drive: Drive, app: Answering, ledger: Ledger, body: bytes) -> None:
    """A body comes again as it was, whatever it is."""
    app.body = body
    post = drive(app, ledger)
    assert post().content == post().content == body


def test_what_has_no_key(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Without a key, and with another method, requests run as if nothing was there."""
    post = drive(app, ledger)
    for _ in range(2):
        assert post(None).status_code == 201
        assert post(method="PUT").status_code == 201
    assert len(app.asked) == 4
    assert ledger.counts() == {}


def test_a_key_is_required(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Where it is, a request without one is refused, and told where to read why."""
    post = drive(app, ledger, required=True, documentation="https://api.test/docs")
    answer = post(None)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "https://api.test/docs#key-missing"
    assert "https://api.test/docs" in answer.headers["link"]
    assert app.asked == []


@pytest.mark.parametrize(
    "key",
    ["", '""', '" "', "k1", '"k1', 'k1"', '"a""b"', '"é"', '"a\\b"', f'"{"x" * 256}"', '"a",'],
)
def test_unusable_keys(drive: Drive, app: Answering, ledger: Ledger, key: str) -> None:
    """What is not a string of RFC 8941, or is too long, is refused."""
    if not key.isascii() and drive is not by_asgi:
        pytest.skip("the test's own client sends no such field")
    answer = drive(app, ledger)(key)
    assert answer.status_code == 400
    assert answer.json()["code"] == "idempotency_key_invalid"
    assert app.asked == []


def test_bare_keys(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Where they are taken, a key is the same with quotation marks and without."""
    post = drive(app, ledger, bare_keys=True)
    assert [post(key).status_code for key in ("k1", '"k1"', " k1", "a,b")] == [201, 201, 201, 400]
    assert len(app.asked) == 1


def test_another_request_under_a_key(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Another body or query is refused; the same body, written otherwise, is not another."""
    post = drive(app, ledger)
    assert post(content=b'{"a": 1, "b": 2.0}').status_code == 201
    assert post(content=b'{"b":2,"a":1.00}').status_code == 201
    answer = post(content=b'{"a": 2, "b": 2.0}')
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_conflict")
    assert post(content=b'{"a": 1, "b": 2.0}', path="/pay?now").status_code == 422
    assert len(app.asked) == 1


def test_each_path_method_and_user_has_its_keys(
    drive: Drive, app: Answering, ledger: Ledger
) -> None:
    """A key says nothing elsewhere, nor to another user."""
    post = drive(app, ledger, scope=lambda request: request.headers.get("x-user"))
    requests: list[Callable[[], Any]] = [
        post,
        lambda: post(path="/refund"),
        lambda: post(method="PATCH"),
        lambda: post(fields={"X-User": "u1"}),
        lambda: post(fields={"X-User": "u2"}),
        lambda: post('"u2 k1"'),
    ]
    for _ in range(2):
        assert [request().status_code for request in requests] == [201] * 6
    assert len(app.asked) == 6


def test_at_work(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """While the first request is at work, a repetition is told to come back."""
    post, began, may_end = drive(app, ledger), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert may_end.wait(30)

    app.before = work
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post)
        assert began.wait(30)
        second = post()
        may_end.set()
        assert first.result(30).status_code == 201
    assert (second.status_code, second.json()["code"]) == (409, "idempotency_in_flight")
    assert int(second.headers["retry-after"]) > 0
    assert post().headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("status", [500, 503])
def test_failed_requests_run_again(
    drive: Drive, app: Answering, ledger: Ledger, status: int
) -> None:
    """An answer of 500 and more is not kept; nor is an error."""
    post = drive(app, ledger)
    app.status = status
    assert post().status_code == status
    app.error = ValueError("boom")
    assert post().status_code == 500
    record = ledger.find(Key("api", "POST /pay  k1"))
    assert record is not None
    assert record.state is State.FAILED
    assert "boom" in (record.error or "")
    app.error, app.status = None, 201
    assert [post().status_code for _ in range(2)] == [201, 201]
    assert len(app.asked) == 3


def test_failures_are_kept(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Where that is asked for, answers of 500 and more are kept."""
    post = drive(app, ledger, keep_5xx=True)
    app.status = 503
    assert [post().status_code for _ in range(2)] == [503, 503]
    assert len(app.asked) == 1


def test_refused_requests_count_as_never_made(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """After an answer of 400 to 499 the key may be used for a request that is put right."""
    post = drive(app, ledger)
    app.status = 422
    assert post(content=b"[1]").status_code == 422
    assert ledger.counts() == {}
    app.status = 201
    assert post(content=b"[2]").status_code == 201


@pytest.mark.parametrize(("kept", "runs"), [(True, 1), ({402}, 1), ({404}, 2)])
def test_refusals_are_kept(
    drive: Drive, app: Answering, ledger: Ledger, kept: Any, runs: int
) -> None:
    """Where that is asked for, answers of 400 to 499 are kept, or some."""
    post = drive(app, ledger, keep_4xx=kept)
    app.status = 402
    assert [post().status_code for _ in range(2)] == [402, 402]
    assert len(app.asked) == runs


def test_a_large_answer_passes_through(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """It is not kept: a repetition does not run, and is told so."""
    post = drive(app, ledger, max_body="1KiB")
    app.body = b"x" * 1025
    assert post().content == app.body
    answer = post()
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_answer_not_kept")
    assert "larger" in answer.json()["detail"]
    assert len(app.asked) == 1


def test_a_large_request(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """A request's body has no limit: the application has it whole."""
    post = drive(app, ledger, max_body="1KiB")
    body = bytes(range(256)) * 5_000
    assert [post(content=body).status_code for _ in range(2)] == [201, 201]
    assert post(content=body[:-1]).status_code == 422
    assert app.asked == [body]


@pytest.mark.parametrize(
    ("policy", "status", "code"),
    [
        (Policy(on_in_doubt="retry"), 201, None),
        (Policy(on_in_doubt="hold"), 409, "idempotency_in_doubt"),
        (Policy(on_in_doubt="dead_letter"), 409, "idempotency_failed"),
    ],
)
def test_in_doubt(
    drive: Drive, app: Answering, policy: Policy, status: int, code: str | None
) -> None:
    """After a crash of the server the policy says whether the request runs again."""
    clock = ManualClock()
    ledger = Ledger(MemoryStore(clock=clock))
    ledger.claim(Key("api", "POST /pay  k1"), "1m")
    clock.advance(61)
    answer = drive(app, ledger, policy=policy)()
    assert answer.status_code == status
    assert code is None or answer.json()["code"] == code


def test_what_does_not_run_again(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """Where a failed request is not to run again, a repetition is told that it has failed."""
    post = drive(app, ledger, policy=Policy(on_failed="skip"))
    app.status = 500
    assert post().status_code == 500
    answer = post()
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_failed")
    assert len(app.asked) == 1


def test_the_error_of_the_agentic_commerce_protocol(
    drive: Drive, app: Answering, ledger: Ledger
) -> None:
    """Errors may have another shape."""
    post = drive(app, ledger, required=True, errors=acp_json)
    assert post(None).json() | {"message": ""} == {
        "type": "invalid_request",
        "code": "idempotency_key_required",
        "message": "",
    }


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
    """Numbers are compared by what they are; what is no JSON, by its bytes."""
    assert (equal_json(one) == equal_json(other)) is are_equal


@pytest.mark.parametrize("body", [b"[" + b"0," * 500_000 + b"0]", b"[" + b"1e9," * 250_000 + b"0]"])
def test_a_body_of_many_numbers_is_cheap_to_compare(body: bytes) -> None:
    """A megabyte of the smallest values that there are keeps no event loop busy for long, and takes
    no more memory than reading it does.
    """
    tracemalloc.start()
    equal_json(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 * len(body)
    began = time.process_time()
    equal_json(body)
    assert time.process_time() - began < 1.0


def test_nothing_is_kept_of_credentials(app: Answering, ledger: Ledger) -> None:
    """What a record holds of an answer has no cookies."""
    by_asgi(app, ledger)()
    record = ledger.find(Key("api", "POST /pay  k1"))
    assert record is not None
    assert "session" not in str(record.result)
    assert base64.b64encode(b"session").decode() not in str(record.result)
