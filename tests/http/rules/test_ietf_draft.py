"""What draft-ietf-httpapi-idempotency-key-header asks of a server, behind each middleware.

The sections are those of the draft: 2.1 syntax, 2.2 uniqueness, 2.3 expiry, 2.4 fingerprint, 2.5
responsibilities, 2.6 enforcement, 2.7 errors, 5 security.
"""

from collections.abc import Mapping
from contextlib import suppress

import pytest
from tests.http.drivers import Asked, Drive, Fields, Reply, Shop

from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.http import HttpAnswer
from oncely.ledger.ledger import Ledger
from oncely.testing import ManualClock

DOCS = "https://api.example.com/docs/idempotency"


def is_problem(reply: Reply, status: int, code: str, title: str) -> bool:
    """Whether the reply is a problem detail of that status, code and title."""
    assert reply.value_of("Content-Type") == "application/problem+json"
    told = reply.json()
    return (reply.status, told["status"], told["code"], told["title"]) == (
        *(status, status, f"idempotency_{code}"),
        title,
    )


@pytest.mark.parametrize(
    "value",
    [
        *('"8e03978e-40d5-43e8-bc93-6894a57f9324"', r'"a \"b\" \\ c"', '"!"', '"k";v=1', ' "k" '),
        *(f'"{"k" * 255}"', '"\' OR 1=1 --"', '"%00"', '"../../etc"', '"{}"', '"${x}"', '"*"'),
    ],
)
def test_a_string_in_quotation_marks_is_a_key(drive: Drive, shop: Shop, value: str) -> None:
    """2.1: the value is a string of structured fields; parameters may follow it. 5: whatever is in
    it, it is found by this text alone.
    """
    site = drive()
    site(f'"{"k" * 254}x"')
    assert [site(value).status, site(value).is_replayed, shop.calls] == [201, True, 2]


@pytest.mark.parametrize(
    "values",
    [
        *(("8e03978e",), ("12",), ("?1",), (":YWJj:",), ("'k'",), ('"k',), ('k"',), ('"a"b"',)),
        *((r'"a\b"',), ('"é"',), ("",), ('""',), ('" "',), ('"a",',), (f'"{"k" * 256}"',)),
        *(('"a"', '"b"'), ('"a"', '"a"'), ('"a"', "")),
    ],
)
def test_what_is_not_one_key_is_refused(drive: Drive, shop: Shop, values: tuple[str, ...]) -> None:
    """2.1 and 5: the key is checked as its format says before the request is looked at. 2.7: what
    was refused leaves nothing, and may be corrected.
    """
    site = drive(bare_keys=False)
    reply = site(None, fields=[("Idempotency-Key", value) for value in values])
    assert is_problem(reply, 400, "key_invalid", "Idempotency-Key cannot be used")
    assert [shop.calls, site('"k"').status] == [0, 201]


def test_a_key_is_not_used_for_another_payload(drive: Drive, shop: Shop) -> None:
    """2.2, 2.4 and 2.7: the payload counts as JSON, or whatever it is of, and so does the query;
    header fields do not.
    """
    site = drive()
    for key, body, same, other in (
        ('"json"', b'{"a": 1, "b": 2.0}', b'{"b":2,"a":1.00}', b'{"a": 2, "b": 2.0}'),
        ('"text"', b"not JSON", b"not JSON", b"not  JSON"),
    ):
        site(key, body)
        assert site(key, same, fields=[("Request-Id", "2")]).is_replayed
        for reply in (site(key, other), site(key, body, query="a=1")):
            assert is_problem(reply, 422, "conflict", "Idempotency-Key is already used")
    assert shop.calls == 2


def test_keys_expire(drive: Drive, shop: Shop, ledger: Ledger, clock: ManualClock) -> None:
    """2.3: a key is kept as long as its policy promises; then its request is a new one."""
    site = drive(policy=Policy(retention="1d"))
    site()
    clock.advance(86_399)
    ledger.purge()
    assert site().is_replayed
    clock.advance(86_401)
    assert ledger.purge() == 1
    assert [site(body=b"another").is_replayed, shop.calls] == [False, 2]


def test_a_fingerprint_of_selected_elements(drive: Drive) -> None:
    """2.4: the server may say which elements count."""
    site = drive(fingerprint=lambda request: request.body.split(b";")[0])
    site(body=b"order 1;sent at 10")
    assert site(body=b"order 1;sent at 11").is_replayed
    assert site(body=b"order 2;sent at 10").status == 422


def test_no_fingerprint_where_mismatches_are_ignored(drive: Drive) -> None:
    """2.4: fingerprints are optional."""
    site = drive(policy=Policy(on_mismatch="ignore"))
    first = site(body=b"1")
    assert site(body=b"2").own == first.own


def test_the_specification_can_be_linked(drive: Drive) -> None:
    """2.5 and 2.7: what the API publishes about its keys is linked in the body and in Link."""
    site = drive(required=True, documentation=DOCS, bare_keys=False)
    site(body=b"1")
    for reply in (site(None), site("unusable"), site(body=b"2")):
        assert reply.json()["type"].startswith(f"{DOCS}#")
        assert reply.value_of("Link") == f'<{DOCS}>; rel="describedby"; type="text/html"'


def test_a_first_request_runs_as_ever(drive: Drive, shop: Shop) -> None:
    """2.6: it is processed, and its answer is its own."""
    fields = [("Content-Type", "text/plain"), ("X-Order", "7")]
    shop.answers = [HttpAnswer(202, fields, b"taken")]
    reply = drive()(body=b"abc")
    assert reply.own == (202, [("content-type", "text/plain"), ("x-order", "7")], b"taken")
    assert not reply.is_replayed
    assert shop.asked == [Asked("POST", "/orders", b"abc")]


@pytest.mark.parametrize("status", [200, 201, 204, 303])
def test_a_retry_gets_the_first_result(drive: Drive, shop: Shop, status: int) -> None:
    """2.6: after the first request is done, its result is what is answered."""
    shop.answers = [HttpAnswer(status, [("X-Order", "7")], b"" if status == 204 else b"it")]
    site = drive()
    first, again = site(), site()
    assert [again.own, again.is_replayed, shop.calls] == [first.own, True, 1]


@pytest.mark.parametrize(
    ("status", "options", "is_kept"),
    [
        *((402, {}, False), (402, {"keep_4xx": True}, True), (402, {"keep_4xx": [402]}, True)),
        *((404, {"keep_4xx": [402]}, False), (500, {}, False), (503, {"keep_5xx": True}, True)),
    ],
)
def test_errors_are_results_where_that_is_set(
    drive: Drive,
    shop: Shop,
    ledger: Ledger,
    status: int,
    options: Mapping[str, bool | list[int]],
    is_kept: bool,
) -> None:
    """2.6: also an error is a result. Where it is not kept, a refused request may be corrected
    under its key, as if it was never made; one that failed runs again.
    """
    shop.answers = [HttpAnswer(status, (), b"no"), HttpAnswer(201, (), b"yes")]
    site = drive(**options)
    assert site(body=b"1").own == (status, [], b"no")
    if is_kept:
        assert [site(body=b"1").own, site(body=b"1").is_replayed] == [(status, [], b"no"), True]
    else:
        assert [*ledger.counts()] == ([("api", State.FAILED)] if status >= 500 else [])
        again = site(body=b"1" if status >= 500 else b"2")
        assert [again.own, again.is_replayed] == [(201, [], b"yes"), False]


def test_a_handler_that_raises_has_failed(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """2.6: its error is not a result, and is in the ledger; the request runs again."""
    errors = [ValueError("boom")]

    def handle(asked: Asked) -> HttpAnswer:
        if errors:
            raise errors.pop()
        return shop(asked)

    site = drive(handle)
    # Django itself answers 500; elsewhere a server does.
    with suppress(ValueError):
        assert site().status == 500
    record = ledger.find(Key("api", "POST /orders  k"))
    assert record is not None
    assert record.state is State.FAILED
    assert "boom" in (record.error or "")
    assert [site().status, site().is_replayed, shop.calls] == [201, True, 1]


def test_a_request_at_the_same_time_is_a_conflict(drive: Drive, shop: Shop) -> None:
    """2.6 and 2.7: 409 while the first is processed, and then its result."""
    replies: list[Reply] = []

    def slow(asked: Asked) -> HttpAnswer:
        replies.append(site())
        return shop(asked)

    site = drive(slow)
    first = site()
    [meanwhile] = replies
    title = "A request is outstanding for this Idempotency-Key"
    assert is_problem(meanwhile, 409, "in_flight", title)
    assert int(meanwhile.value_of("Retry-After") or "") > 0
    assert [site().own, shop.calls] == [first.own, 1]


def test_a_missing_key_is_refused_where_it_is_required(drive: Drive, shop: Shop) -> None:
    """2.7: 400 with a problem that says so."""
    reply = drive(required=True)(None)
    assert is_problem(reply, 400, "key_required", "Idempotency-Key is missing")
    assert [reply.value_of("Content-Language"), shop.calls] == ["en", 0]


def test_a_missing_key_is_fine_where_it_is_not(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """2.7: only operations that require the key refuse requests without one."""
    site = drive()
    assert [site(None).status, site(None).status] == [201, 201]
    assert [shop.calls, ledger.counts()] == [2, {}]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_idempotent_methods_need_no_key(drive: Drive, shop: Shop, method: str) -> None:
    """1: POST and PATCH are what keys are for; of others the field is not looked at."""
    site = drive(required=True)
    assert [site("unusable", method=method).status, site(None, method=method).status] == [201, 201]
    assert shop.calls == 2


def test_each_operation_and_user_has_keys_of_its_own(drive: Drive, shop: Shop) -> None:
    """5: keys are looked up together with what only the server knows of the client: nobody fetches
    another's answer, and a key of one operation says nothing of another.
    """
    site = drive(scope=lambda request: request.headers.get("x-user", "nobody"))
    users: list[Fields] = [[], [("X-User", "u1")], [("X-User", "u2")]]
    for is_replayed in (False, True):
        replies = [
            *(site(path=path, fields=user) for path in ("/orders", "/refunds") for user in users),
            *(site(method="PATCH"), site('"u2 k"')),
        ]
        assert {reply.is_replayed for reply in replies} == {is_replayed}
    assert shop.calls == len(replies)
