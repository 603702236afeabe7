"""What the Agentic Commerce Protocol asks of a server in section 6, rule by rule."""

import json

import pytest
from tests.http.drivers import Asked, Drive, Reply, Shop, Site

from oncely.http import HttpAnswer, acp_json
from oncely.ledger import Ledger
from oncely.testing import ManualClock

KEY = "6f9619ff-8b86-d011-b42d-00cf4fc964ff"
CHECKOUT = "/checkout_sessions"


@pytest.fixture
def merchant(drive: Drive) -> Site:
    """A server set as the protocol asks."""
    return drive(**AS_ACP_ASKS)


AS_ACP_ASKS = {
    "methods": ["POST"],
    "errors": acp_json,
    "bare_keys": True,
    "required": True,
    "scope": lambda request: request.headers.get("authorization"),
}


def is_error(reply: Reply, status: int, code: str) -> bool:
    """Whether the reply is a flat error of that status and code."""
    error = reply.json()
    assert error["message"]
    return (reply.status, error["type"], error["code"]) == (status, "invalid_request", code)


def test_6_1_a_key_is_required_for_each_post(merchant: Site, shop: Shop) -> None:
    """Without one: 400 and idempotency_key_required."""
    assert is_error(merchant(None, path=CHECKOUT), 400, "idempotency_key_required")
    assert is_error(merchant(None, path=f"{CHECKOUT}/1/cancel"), 400, "idempotency_key_required")
    assert shop.calls == 0


def test_6_1_reading_needs_no_key(merchant: Site) -> None:
    """Only requests with POST have keys."""
    assert merchant(None, method="GET", path=f"{CHECKOUT}/1").status == 201


@pytest.mark.parametrize("key", [KEY, "k" * 255, "a.b:c=d/e", f'"{KEY}"'])
def test_6_1_a_key_is_opaque(merchant: Site, shop: Shop, key: str) -> None:
    """Up to 255 characters, with or without quotation marks."""
    merchant(key, path=CHECKOUT)
    assert [merchant(key, path=CHECKOUT).is_replayed, shop.calls] == [True, 1]


def test_6_1_a_key_has_a_maximum_length(merchant: Site, shop: Shop) -> None:
    """256 characters are not a key."""
    reply = merchant("k" * 256, path=CHECKOUT)
    assert is_error(reply, 400, "idempotency_key_invalid")
    assert "too long" in reply.json()["message"]
    assert shop.calls == 0


def test_6_1_long_keys_are_told_apart_to_the_end(merchant: Site) -> None:
    """What does not fit into the ledger's column is not cut off."""
    merchant("k" * 254 + "1", path=CHECKOUT)
    assert not merchant("k" * 254 + "2", path=CHECKOUT).is_replayed


def test_6_1_keys_are_of_one_identity_and_endpoint(merchant: Site, shop: Shop) -> None:
    """The same key of another client, or on another path, is another key."""
    for path in (CHECKOUT, f"{CHECKOUT}/1", f"{CHECKOUT}/1/complete"):
        for token in ("Bearer anna", "Bearer ben"):
            reply = merchant(KEY, path=path, fields=[("Authorization", token)])
            assert not reply.is_replayed
    assert shop.calls == 6


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1}', True),
        ('{"a": {"x": 1, "y": [2]}}', '{"a": {"y": [2], "x": 1}}', True),
        ('{"a": null}', "{}", False),
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": 1.50}', '{"a": 1.5}', True),
        ('{"a": 10}', '{"a": 1e1}', True),
        ('{"a": 10}', '{"a": 1}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 0}', '{"a": false}', False),
        ("[1, 2]", "[2, 1]", False),
        # More digits than a float has.
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}', False),
        ('{"a": 0.1}', '{"a": 0.1000000000000000000001}', False),
        ('"\\u00e9"', '"é"', True),
        # 6.7: also of an extension's fields.
        ('{"a": 1, "x_discount": {"code": "A"}}', '{"a": 1, "x_discount": {"code": "B"}}', False),
        ('{"a": 1, "x_discount": {}}', '{"a": 1}', False),
    ],
)
def test_6_2_requests_are_equal_as_json(
    merchant: Site, one: str, other: str, is_equal: bool
) -> None:
    """What is equal however it is written, and what is not."""
    merchant(KEY, one.encode())
    reply = merchant(KEY, other.encode())
    assert reply.is_replayed is is_equal
    assert is_equal or is_error(reply, 422, "idempotency_conflict")


def test_6_2_header_fields_do_not_count(merchant: Site) -> None:
    """Only the body says whether two requests are the same."""
    merchant(KEY, fields=[("API-Version", "2026-01-30"), ("Request-Id", "1")])
    assert merchant(KEY, fields=[("Request-Id", "2")]).is_replayed


@pytest.mark.parametrize("path", [CHECKOUT, f"{CHECKOUT}/1"])
def test_6_3_a_repetition_gets_the_same_answer(merchant: Site, shop: Shop, path: str) -> None:
    """Status and body, with Idempotent-Replayed, for creating and updating; nothing runs twice."""
    first, again = merchant(KEY, path=path), merchant(KEY, path=path)
    assert again.own == first.own
    assert [first.value_of("Idempotent-Replayed"), again.value_of("Idempotent-Replayed")] == [
        None,
        "true",
    ]
    assert shop.calls == 1


def test_6_4_a_request_in_flight_is_a_conflict(drive: Drive, shop: Shop) -> None:
    """409 and idempotency_in_flight, with Retry-After in seconds."""
    replies: list[Reply] = []

    def slow(asked: Asked) -> HttpAnswer:
        replies.append(site(KEY))
        return shop(asked)

    site = drive(slow, **AS_ACP_ASKS)
    site(KEY)
    assert is_error(replies[0], 409, "idempotency_in_flight")
    assert (replies[0].value_of("Retry-After") or "").isdigit()


@pytest.mark.parametrize("status", [500, 502, 503, 599])
def test_6_5_server_errors_are_not_kept(merchant: Site, shop: Shop, status: int) -> None:
    """A retry after one is a fresh request."""
    done = HttpAnswer(201, (), b"done")
    shop.answers = [HttpAnswer(status, (), b"out of order"), done, HttpAnswer(201, (), b"twice")]
    replies = [merchant(KEY), merchant(KEY), merchant(KEY)]
    assert [reply.status for reply in replies] == [status, 201, 201]
    assert [reply.is_replayed for reply in replies] == [False, False, True]
    assert replies[2].body == b"done"


def test_6_6_answers_are_kept_for_a_day_at_least(
    merchant: Site, shop: Shop, ledger: Ledger, clock: ManualClock
) -> None:
    """With the policy's retention a purge leaves them; after that the key is new, and no error."""
    merchant(KEY)
    clock.advance(24 * 3600)
    ledger.purge()
    assert merchant(KEY).is_replayed
    clock.advance(31 * 24 * 3600)
    ledger.purge()
    reply = merchant(KEY, json.dumps({"another": "body"}).encode())
    assert [reply.status, reply.is_replayed, shop.calls] == [201, False, 2]
