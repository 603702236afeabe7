"""Whose key it is, who may come, and what of an answer is kept, behind each middleware."""

import logging
from collections.abc import Sequence

import pytest
from tests.http.drivers import Drive, Fields, Shop

from oncely.http import HttpAnswer
from oncely.ledger.ledger import Ledger

ANNA: Fields = [("Authorization", "Bearer secret-of-anna")]
BEN: Fields = [("Authorization", "Bearer secret-of-ben")]


def ids(ledger: Ledger) -> str:
    """All message ids."""
    return " ".join(record.key.message_id for record in ledger.scan())


# ---- Whose key ---------------------------------------------------------------------------------


def test_credentials_tell_callers_apart(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """Without a scope: nobody gets another's answer, least of all who shows nothing. What was shown
    stands in no id.
    """
    site = drive()
    callers: Sequence[Fields] = [ANNA, BEN, [], [("Cookie", "session=1")], [*ANNA, *BEN[:0]]]
    assert [site(fields=each).is_replayed for each in callers] == [False] * 4 + [True]
    assert shop.calls == 4
    assert "secret" not in ids(ledger)
    assert "session" not in ids(ledger)


def test_other_credentials(drive: Drive) -> None:
    """As the application names them, in any case; others are not looked at."""
    site = drive(credentials=["X-API-Key"])
    keys: Sequence[Fields] = [[("x-api-key", "1"), *ANNA], [("X-Api-Key", "2"), *ANNA]]
    assert [site(fields=each).is_replayed for each in keys] == [False, False]
    assert site(fields=[("x-api-key", "1"), *BEN]).is_replayed


def test_a_scope_is_stored_as_a_digest(drive: Drive, ledger: Ledger) -> None:
    """Also where it is a token, as it should not be; and credentials do not count then."""
    site = drive(scope=lambda request: request.headers["x-user"])
    user: Fields = [("X-User", "secret-of-anna")]
    assert not site(fields=[*user, *ANNA]).is_replayed
    assert site(fields=[*user, *BEN]).is_replayed
    assert not site(fields=[("X-User", "x"), *ANNA]).is_replayed
    assert "secret" not in ids(ledger)


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_scope_that_returns_nothing(
    drive: Drive, shop: Shop, ledger: Ledger, caplog: pytest.LogCaptureFixture, nothing: str | None
) -> None:
    """All such callers would share their answers: 500, and the log says once what to write."""
    site = drive(scope=lambda _: nothing)
    with caplog.at_level(logging.ERROR):
        replies = [site(), site()]
    assert [reply.status for reply in replies] == [500, 500]
    assert replies[0].json()["code"] == "idempotency_misconfigured"
    assert (shop.calls, ids(ledger)) == (0, "")
    [told] = [record.getMessage() for record in caplog.records if "scope" in record.getMessage()]
    assert "scope: it returned nothing for POST /orders; return str(user.id)" in told


def test_authorize_is_asked_before_anything(drive: Drive, shop: Shop, ledger: Ledger) -> None:
    """For a new request and for a repetition: a stranger neither runs nor gets an answer."""
    site = drive(
        authorize=lambda request: request.headers.get("authorization") == ANNA[0][1],
        scope=lambda _: "all",
    )
    refused = site(fields=BEN)
    assert [refused.status, refused.json()["code"]] == [403, "idempotency_not_authorized"]
    assert (shop.calls, ids(ledger)) == (0, "")
    assert [site(fields=ANNA).status, site(fields=ANNA).is_replayed] == [201, True]
    assert [site(fields=BEN).status, shop.calls] == [403, 1]


# ---- What is kept ------------------------------------------------------------------------------


def masked(answer: HttpAnswer) -> HttpAnswer:
    """Without the number of a card."""
    return HttpAnswer(answer.status, answer.fields, answer.body.replace(b"4111", b"****"))


@pytest.mark.parametrize(
    ("keep", "kept", "status", "again"),
    [
        (masked, "card ****", 201, b"card ****"),
        ((masked, lambda answer: HttpAnswer(200, (), answer.body[::-1])), "****", 200, b"**** d"),
        (lambda _: None, "keeps nothing", 409, b"keeps nothing"),
        (lambda _: 1 / 0, "division by zero", 409, b"division by zero"),
    ],
)
def test_what_is_kept_is_chosen(
    drive: Drive, shop: Shop, ledger: Ledger, keep: object, kept: str, status: int, again: bytes
) -> None:
    """Masked, encrypted, or nothing. The request has had its effect: its own client gets the answer
    also where the function fails.
    """
    shop.answers = [HttpAnswer(201, [("Content-Type", "text/plain")], b"card 4111")]
    site = drive(keep=keep)
    first, second = site(), site()
    assert [first.status, first.body] == [201, b"card 4111"]
    [record] = ledger.scan()
    assert "4111" not in str(record.result)
    assert kept in str(record.result)
    assert second.status == status
    assert again in second.body
    assert second.is_replayed == (status < 400)
    assert shop.calls == 1
