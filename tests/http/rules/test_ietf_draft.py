"""What draft-ietf-httpapi-idempotency-key-header asks of a server, rule by rule.

The sections are those of the draft: 2.1 syntax, 2.2 uniqueness, 2.3 expiry, 2.4 fingerprint, 2.5
responsibilities, 2.6 enforcement, 2.7 errors, 5 security.
"""

import pytest
from tests.http.drivers import Asked, Drive, Fields, Reply, Shop

from oncely.http import HttpAnswer
from oncely.ledger import Ledger
from oncely.testing import ManualClock

DOCS = "https://api.example.com/docs/idempotency"


def is_problem(reply: Reply, status: int, title: str) -> bool:
    """Whether the reply is a problem detail of that status and title."""
    return (
        reply.status == status
        and reply.value_of("Content-Type") == "application/problem+json"
        and reply.json()["status"] == status
        and reply.json()["title"] == title
    )


@pytest.mark.parametrize(
    "value",
    ['"8e03978e-40d5-43e8-bc93-6894a57f9324"', r'"a \"b\" \\ c"', '"!"', '"k";v=1', ' "k" '],
)
def test_01_a_string_in_quotation_marks_is_a_key(drive: Drive, shop: Shop, value: str) -> None:
    """2.1: the value is a string of structured fields; parameters may follow it."""
    site = drive()
    assert [site(value).status, site(value).is_replayed, shop.calls] == [201, True, 1]


@pytest.mark.parametrize(
    "value",
    ["8e03978e", "12", "?1", ":YWJj:", "'k'", '"k', 'k"', '"a"b"', r'"a\b"', '"é"', "", '""'],
)
def test_02_what_is_not_a_string_is_refused(drive: Drive, shop: Shop, value: str) -> None:
    """2.1 and 5: the key is checked as its format says before the request is looked at."""
    reply = drive()(value)
    assert is_problem(reply, 400, "Idempotency-Key cannot be used")
    assert shop.calls == 0


@pytest.mark.parametrize("values", [('"a"', '"b"'), ('"a"', '"a"'), ('"a"', "")])
def test_03_a_request_has_one_key(drive: Drive, shop: Shop, values: tuple[str, str]) -> None:
    """2.1: more than one field of that name is a client's error."""
    fields: Fields = [("Idempotency-Key", value) for value in values]
    reply = drive()(None, fields=fields)
    assert is_problem(reply, 400, "Idempotency-Key cannot be used")
    assert shop.calls == 0


def test_04_a_key_is_found_by_its_text(drive: Drive, shop: Shop) -> None:
    """2.1: parameters and white space around it are not part of the key."""
    site = drive()
    site('"k"')
    assert site('  "k";a=1;b ').is_replayed


def test_05_a_key_is_not_used_for_another_payload(drive: Drive, shop: Shop) -> None:
    """2.2 and 2.7: 422, and the handler does not run."""
    site = drive()
    site(body=b'{"amount": 1}')
    reply = site(body=b'{"amount": 2}')
    assert is_problem(reply, 422, "Idempotency-Key is already used")
    assert shop.calls == 1


def test_06_keys_expire(drive: Drive, shop: Shop, ledger: Ledger, clock: ManualClock) -> None:
    """2.3: a key may be forgotten after a time; then its request is a new one."""
    site = drive()
    site()
    clock.advance(86_401)
    assert ledger.purge(older_than="1d") == 1
    reply = site()
    assert [reply.is_replayed, shop.calls] == [False, 2]


def test_07_keys_do_not_expire_early(
    drive: Drive, shop: Shop, ledger: Ledger, clock: ManualClock
) -> None:
    """2.3: what the policy promises is kept."""
    site = drive()
    site()
    clock.advance(86_399)
    ledger.purge(older_than="1d")
    assert site().is_replayed


def test_08_a_fingerprint_of_the_whole_payload(drive: Drive) -> None:
    """2.4: the payload counts, whatever it is of; and so does the query."""
    site = drive()
    site(body=b"not JSON")
    assert site(body=b"not  JSON").status == 422
    assert site(body=b"not JSON", query="a=1").status == 422
    assert site(body=b"not JSON").is_replayed


def test_09_a_fingerprint_of_selected_elements(drive: Drive) -> None:
    """2.4: the server may say which elements count."""
    site = drive(fingerprint=lambda request: request.body.split(b";")[0])
    site(body=b"order 1;sent at 10")
    assert site(body=b"order 1;sent at 11").is_replayed
    assert site(body=b"order 2;sent at 10").status == 422


def test_10_no_fingerprint_where_mismatches_are_ignored(drive: Drive) -> None:
    """2.4: fingerprints are optional."""
    from oncely import Policy

    site = drive(policy=Policy(on_mismatch="ignore"))
    first = site(body=b"1")
    assert site(body=b"2").own == first.own


def test_11_the_specification_can_be_linked(drive: Drive) -> None:
    """2.5 and 2.7: what the API publishes about its keys is linked in the body and in Link."""
    site = drive(required=True, documentation=DOCS)
    site(body=b"1")
    for reply in (site(None), site("unusable"), site(body=b"2")):
        assert reply.json()["type"].startswith(f"{DOCS}#")
        assert reply.value_of("Link") == f'<{DOCS}>; rel="describedby"; type="text/html"'


def test_12_a_first_request_runs_as_ever(drive: Drive, shop: Shop) -> None:
    """2.6: it is processed, and its answer is its own."""
    fields = [("Content-Type", "text/plain"), ("X-Order", "7")]
    shop.answers = [HttpAnswer(202, fields, b"taken")]
    reply = drive()(body=b"abc")
    assert reply.own == (202, [("content-type", "text/plain"), ("x-order", "7")], b"taken")
    assert not reply.is_replayed
    assert shop.asked == [Asked("POST", "/orders", b"abc")]


@pytest.mark.parametrize("status", [200, 201, 204, 303])
def test_13_a_retry_gets_the_first_result(drive: Drive, shop: Shop, status: int) -> None:
    """2.6: after the first request is done, its result is what is answered."""
    shop.answers = [HttpAnswer(status, [("X-Order", "7")], b"" if status == 204 else b"it")]
    site = drive()
    first, again = site(), site()
    assert [again.own, again.is_replayed, shop.calls] == [first.own, True, 1]


@pytest.mark.parametrize(("status", "option"), [(402, "keep_4xx"), (500, "keep_5xx")])
def test_14_errors_are_results_where_that_is_set(
    drive: Drive, shop: Shop, status: int, option: str
) -> None:
    """2.6: also an error is a result; by default it is not kept here."""
    shop.answers = [HttpAnswer(status, (), b"no")]
    kept, not_kept = drive(**{option: True}), drive(consumer="other")
    assert [kept().own, kept().is_replayed, shop.calls] == [(status, [], b"no"), True, 1]
    assert [not_kept().own, not_kept().is_replayed, shop.calls] == [(status, [], b"no"), False, 3]


def test_15_a_request_at_the_same_time_is_a_conflict(drive: Drive, shop: Shop) -> None:
    """2.6 and 2.7: 409 while the first is processed, and then its result."""
    replies: list[Reply] = []

    def slow(asked: Asked) -> HttpAnswer:
        replies.append(site())
        return shop(asked)

    site = drive(slow)
    first = site()
    [meanwhile] = replies
    assert is_problem(meanwhile, 409, "A request is outstanding for this Idempotency-Key")
    assert int(meanwhile.value_of("Retry-After") or "") > 0
    assert [site().own, shop.calls] == [first.own, 1]


def test_16_a_missing_key_is_refused_where_it_is_required(drive: Drive, shop: Shop) -> None:
    """2.7: 400 with a problem that says so."""
    reply = drive(required=True)(None)
    assert is_problem(reply, 400, "Idempotency-Key is missing")
    assert [reply.value_of("Content-Language"), shop.calls] == ["en", 0]


def test_17_a_missing_key_is_fine_where_it_is_not(drive: Drive, shop: Shop) -> None:
    """2.7: only operations that require the key refuse requests without one."""
    site = drive()
    assert [site(None).status, site(None).status, shop.calls] == [201, 201, 2]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_18_idempotent_methods_need_no_key(drive: Drive, shop: Shop, method: str) -> None:
    """1: POST and PATCH are what keys are for; of others the field is not looked at."""
    site = drive(required=True)
    assert [site("unusable", method=method).status, site(None, method=method).status] == [201, 201]
    assert shop.calls == 2


def test_19_a_corrected_request_may_run(drive: Drive, shop: Shop) -> None:
    """2.7: a client corrects its request, and may repeat it: what was refused has left nothing."""
    site = drive(required=True)
    site(None)
    site("k")
    assert site('"k"').status == 201


def test_20_another_users_answers_are_not_fetched(drive: Drive, shop: Shop) -> None:
    """5: keys are looked up together with what only the server knows of the client."""
    site = drive(scope=lambda request: request.headers["authorization"])
    anna = site(fields=[("Authorization", "anna")])
    ben = site(fields=[("Authorization", "ben")])
    assert [anna.own == ben.own, ben.is_replayed, shop.calls] == [False, False, 2]
    assert site(fields=[("Authorization", "anna")]).own == anna.own


@pytest.mark.parametrize("other", [{"path": "/refunds"}, {"method": "PATCH"}])
def test_21_each_operation_has_keys_of_its_own(
    drive: Drive, shop: Shop, other: dict[str, str]
) -> None:
    """5: the look-up key is composed; a key of one operation says nothing of another."""
    site = drive()
    site()
    assert [site(**other).is_replayed, shop.calls] == [False, 2]  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["' OR 1=1 --", "%00", "../../etc", "{}", "k\\\\", "${x}", "*"])
def test_22_nothing_is_injected(drive: Drive, shop: Shop, ledger: Ledger, key: str) -> None:
    """5: a key is data for whoever looks it up."""
    site = drive()
    site()
    assert not site(f'"{key}"').is_replayed
    assert [site(f'"{key}"').is_replayed, shop.calls] == [True, 2]
