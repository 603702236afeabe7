"""What draft-ietf-httpapi-idempotency-key-header asks of a server, by its sections."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.http.drivers import Answering, Drive, by_asgi

from oncely.core.policy import Policy
from oncely.ledger import Ledger
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

DOCS = "https://api.test/docs"


def test_2_1_a_key_is_a_string(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.1, MUST: the value is a string of RFC 8941; an integer, a token or bytes are not."""
    post = drive(app, ledger)
    keys = ['"8e03978e-40d5-43e8-bc93-6894a57f9324"', "7", "token", ":YWJj:", "?1"]
    assert [post(key).status_code for key in keys] == [201, 400, 400, 400, 400]


def test_2_1_one_field(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.1, MUST NOT: a request with two fields, also joined by a proxy, is refused."""
    post = drive(app, ledger)
    assert post('"a", "a"').status_code == 400
    if drive is by_asgi:  # Servers of WSGI have joined them by then.
        assert post('"a"', fields={"Idempotency-Key": '"a"'}).status_code == 400
    assert app.asked == []


def test_2_2_a_key_is_for_one_payload(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.2, MUST NOT: a key that is used again with another payload does not run."""
    post = drive(app, ledger)
    assert [post(content=body).status_code for body in (b"1", b"2", b"1")] == [201, 422, 201]
    assert app.asked == [b"1"]


def test_2_3_keys_expire(drive: Drive, app: Answering) -> None:
    """2.3, MAY and SHOULD: after the retention, which the policy tells, a key is a new one."""
    clock = ManualClock()
    ledger = Ledger(MemoryStore(clock=clock))
    post = drive(app, ledger, policy=Policy(retention="1d"))
    post()
    clock.advance(86_399)
    assert ledger.purge() == 0
    clock.advance(2)
    assert ledger.purge() == 1
    assert "idempotency-replayed" not in post().headers
    assert len(app.asked) == 2


@pytest.mark.parametrize("status", [200, 201, 204, 303])
def test_2_6_first_and_retry(drive: Drive, app: Answering, ledger: Ledger, status: int) -> None:
    """2.6, SHOULD: the first request runs as any; a retry after it is given its result."""
    app.status, app.body = status, b""
    post = drive(app, ledger)
    assert [post().status_code for _ in range(2)] == [status, status]
    assert len(app.asked) == 1


def test_2_6_the_result_may_be_an_error(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.6, SHOULD: also an error is a result, where the settings have it so."""
    app.status = 402
    post = drive(app, ledger, keep_4xx=True)
    assert [post().status_code for _ in range(2)] == [402, 402]
    assert len(app.asked) == 1


def test_2_6_concurrent(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.6, MUST, and 2.7, SHOULD: while the first is at work, 409 with what is the problem."""
    post, began, may_end = (
        drive(app, ledger, documentation=DOCS),
        *(threading.Event() for _ in range(2)),
    )

    def work() -> None:
        began.set()
        assert may_end.wait(30)

    app.before = work
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post)
        assert began.wait(30)
        answer = post()
        may_end.set()
        first.result(30)
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert {"type", "title", "detail", "status"} <= answer.json().keys()


def test_2_7_missing(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.7, SHOULD: 400 with a link to the documentation, in the body and as a field."""
    answer = drive(app, ledger, required=True, documentation=DOCS)(None)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["content-language"] == "en"
    assert answer.json()["type"].startswith(DOCS)
    assert answer.headers["link"] == f'<{DOCS}>; rel="describedby"; type="text/html"'


def test_2_7_reused(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """2.7, SHOULD: 422 with a link to the documentation; and again, until it is corrected."""
    post = drive(app, ledger, documentation=DOCS)
    post(content=b"1")
    for _ in range(2):
        answer = post(content=b"2")
        assert answer.status_code == 422
        assert answer.json()["type"].startswith(DOCS)
    assert post('"another"', content=b"2").status_code == 201


def test_5_keys_are_validated_first(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """5, recommended: nothing is looked up for what is not a key."""
    post = drive(app, ledger)
    for key in ("x' OR 1=1", '"\\n"', '"' + "x" * 256 + '"'):
        assert post(key).status_code == 400
    assert ledger.counts() == {}


def test_5_a_composite_key(drive: Drive, app: Answering, ledger: Ledger) -> None:
    """5, recommended: who guesses the key of another is not given the other's answer."""
    post = drive(app, ledger, scope=lambda request: request.headers.get("x-tenant"))
    post(fields={"X-Tenant": "a"})
    assert "idempotency-replayed" not in post(fields={"X-Tenant": "b"}).headers
