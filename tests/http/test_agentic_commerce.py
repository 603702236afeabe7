"""What section 6 of the Agentic Commerce Protocol's checkout asks of a server, by its numbers."""

from typing import Any

import pytest
from tests.http.drivers import Answering, Drive, Driver

from oncely.core.policy import Policy
from oncely.core.record import Key
from oncely.http import acp_json
from oncely.ledger import Ledger
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock


@pytest.fixture
def post(drive: Drive, app: Answering, ledger: Ledger) -> Driver:
    return drive(app, ledger, **SETTINGS)


SETTINGS: dict[str, Any] = {
    "required": True,
    "bare_keys": True,
    "keep_4xx": True,
    "errors": acp_json,
    "scope": lambda request: request.headers.get("authorization"),
}


def test_6_1_required(post: Driver, app: Answering) -> None:
    """A request without a key is refused by its own code."""
    answer = post(None)
    assert answer.status_code == 400
    assert answer.json()["type"] == "invalid_request"
    assert answer.json()["code"] == "idempotency_key_required"
    assert app.asked == []


def test_6_1_an_opaque_string(post: Driver) -> None:
    """A key is any string of up to 255 characters, without quotation marks."""
    assert post("x" * 255).status_code == 201
    assert post("x" * 256).status_code == 400


def test_6_1_scope(post: Driver, app: Answering) -> None:
    """Keys count for one identity and one endpoint."""
    post("k", path="/checkout_sessions", fields={"Authorization": "Bearer a"})
    post("k", path="/checkout_sessions/1/complete", fields={"Authorization": "Bearer a"})
    post("k", path="/checkout_sessions", fields={"Authorization": "Bearer b"})
    assert len(app.asked) == 3


@pytest.mark.parametrize(
    ("one", "other", "status"),
    [
        (b'{"a": 1, "b": 2}', b'{"b": 2, "a": 1}', 201),
        (b'{"a": 1.0}', b'{"a": 1}', 201),
        (b'{"a": null}', b"{}", 422),
        (b'{"a": [1, 2]}', b'{"a": [2, 1]}', 422),
        (b'{"a": {"extension": 1}}', b'{"a": {"extension": 2}}', 422),
    ],
)
def test_6_2_equivalence(post: Driver, one: bytes, other: bytes, status: int) -> None:
    """6.2 and 6.7: bodies are compared as JSON, what extensions define with them."""
    assert post("k", content=one).status_code == 201
    assert post("k", content=other).status_code == status


def test_6_2_fields_are_not_compared(post: Driver) -> None:
    """Header fields make no other request."""
    post("k", fields={"User-Agent": "one"})
    assert post("k", fields={"User-Agent": "two"}).headers["idempotent-replayed"] == "true"


def test_6_3_replay(post: Driver, app: Answering) -> None:
    """A repetition is given the first answer with its status; nothing runs again."""
    app.status = 402
    first, second = post("k"), post("k")
    assert (second.status_code, second.content) == (402, first.content)
    assert second.headers["idempotent-replayed"] == "true"
    assert len(app.asked) == 1


def test_6_4_errors(post: Driver) -> None:
    """Another body is refused by its own code."""
    post("k", content=b"1")
    answer = post("k", content=b"2")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_conflict")
    assert answer.headers["content-type"] == "application/json"


def test_6_4_in_flight(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """What is at work is told with the time to come back."""
    ledger.claim(Key("api", "POST /pay  k"), "1m")
    answer = drive(app, ledger, **SETTINGS)("k")
    assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_in_flight")
    assert int(answer.headers["retry-after"]) > 0


def test_6_5_server_errors(post: Driver, app: Answering) -> None:
    """An answer of 500 and more is not kept: the next request is a fresh one."""
    app.status = 503
    assert post("k").status_code == 503
    app.status = 201
    assert post("k").status_code == 201
    assert len(app.asked) == 2


def test_6_6_retention(drive: Drive, app: Answering) -> None:
    """An answer is kept for a day at least; after that its key is new."""
    clock = ManualClock()
    ledger = Ledger(MemoryStore(clock=clock))
    post = drive(app, ledger, **SETTINGS, policy=Policy(retention="24h"))
    post("k")
    clock.advance(86_400)
    ledger.purge()
    assert post("k").headers["idempotent-replayed"] == "true"
    clock.advance(86_401)
    ledger.purge()
    assert "idempotent-replayed" not in post("k").headers
