"""What Stripe documents of its idempotent requests: what holds by default, what by a setting, and
what differs here.

Its page: https://docs.stripe.com/api/idempotent_requests
"""

from typing import Any

import pytest
from tests.http.drivers import Asked, Drive, Reply, Shop

from oncely.http import HttpAnswer
from oncely.ledger import Ledger
from oncely.testing import ManualClock

AS_STRIPE: dict[str, Any] = {
    "methods": ["POST"],
    "bare_keys": True,
    "keep_4xx": True,
    "keep_5xx": True,
}
KEY = "KG5LxwFBepaKHyUD"
FORM = b"description=My+First+Test+Customer"


# ---- By default --------------------------------------------------------------------------------


def test_01_a_repetition_gets_status_and_body_of_the_first(drive: Drive, shop: Shop) -> None:
    """And it says that it is one, in the field that Stripe's clients look for."""
    site = drive()
    first, again = site(body=FORM), site(body=FORM)
    assert again.own == first.own
    assert again.value_of("Idempotent-Replayed") == "true"
    assert first.value_of("Idempotent-Replayed") is None


def test_02_other_parameters_are_an_error(drive: Drive, shop: Shop) -> None:
    """Those of a repetition are compared with the first one's."""
    site = drive()
    site(body=FORM)
    assert site(body=FORM + b"&email=a").status == 422
    assert shop.calls == 1


def test_03_keys_have_up_to_255_characters(drive: Drive) -> None:
    """And not one more."""
    site = drive()
    assert [site(f'"{"k" * 255}"').status, site(f'"{"k" * 256}"').status] == [201, 400]


def test_04_a_key_that_was_pruned_is_new(
    drive: Drive, shop: Shop, ledger: Ledger, clock: ManualClock
) -> None:
    """As early as after 24 hours, where that is set."""
    site = drive()
    site()
    clock.advance(24 * 3600 + 1)
    ledger.purge(older_than="24h")
    assert [site(body=FORM).status, shop.calls] == [201, 2]


def test_05_without_a_key_each_request_runs(drive: Drive, shop: Shop) -> None:
    """A key is the client's choice."""
    site = drive()
    site(None), site(None)
    assert shop.calls == 2


def test_06_a_conflict_with_a_request_at_work_is_not_kept(drive: Drive, shop: Shop) -> None:
    """It may be repeated, and gets the result then."""
    replies: list[Reply] = []

    def slow(asked: Asked) -> HttpAnswer:
        replies.append(site())
        return shop(asked)

    site = drive(slow)
    site()
    assert [replies[0].status, site().status] == [409, 201]


def test_07_a_request_whose_parameters_are_refused_is_not_kept(drive: Drive, shop: Shop) -> None:
    """What fails validation may be put right under the same key."""
    shop.answers = [HttpAnswer(400, (), b"amount is missing"), HttpAnswer(201, (), b"charged")]
    site = drive()
    assert [site(body=b"").status, site(body=b"amount=1").status] == [400, 201]


# ---- By a setting ------------------------------------------------------------------------------


def test_08_keys_stand_without_quotation_marks(drive: Drive) -> None:
    """By `bare_keys`; else a key has them."""
    site = drive(**AS_STRIPE)
    assert [site(KEY).is_replayed, site(KEY).is_replayed] == [False, True]
    assert site(f'"{KEY}"').is_replayed
    assert drive()(KEY).status == 400


@pytest.mark.parametrize("status", [400, 402, 404, 429, 500, 503])
def test_09_failures_are_kept(drive: Drive, shop: Shop, status: int) -> None:
    """By `keep_4xx` and `keep_5xx`."""
    shop.answers = [HttpAnswer(status, (), b"no"), HttpAnswer(201, (), b"yes")]
    site = drive(**AS_STRIPE)
    assert [site(KEY).status, site(KEY).status, site(KEY).is_replayed] == [status, status, True]


def test_10_some_failures_are_kept(drive: Drive, shop: Shop) -> None:
    """By `keep_4xx`, which may name the statuses."""
    shop.answers = [HttpAnswer(402, (), b"declined"), HttpAnswer(404, (), b"?"), HttpAnswer(201)]
    site = drive(keep_4xx=[402])
    assert [site('"a"').status, site('"a"').status] == [402, 402]
    assert [site('"b"').status, site('"b"').status] == [404, 201]


# ---- What differs ------------------------------------------------------------------------------


def test_11_a_failure_runs_again_by_default(drive: Drive, shop: Shop) -> None:
    """Stripe repeats a 500 for ever; here it has failed, and the repetition is its retry."""
    shop.answers = [HttpAnswer(500, (), b"no"), HttpAnswer(201, (), b"yes")]
    site = drive()
    assert [site().status, site().status, site().body] == [500, 201, b"yes"]


def test_12_other_parameters_are_422(drive: Drive) -> None:
    """Stripe says 400 and idempotency_error; the draft says 422."""
    site = drive(**AS_STRIPE)
    site(KEY, FORM)
    assert site(KEY, b"").status == 422


def test_13_delete_may_have_keys(drive: Drive) -> None:
    """Stripe ignores keys of GET and DELETE; here each method can be named, also DELETE."""
    site = drive(methods=["POST", "DELETE"])
    assert [site(method="DELETE").is_replayed, site(method="DELETE").is_replayed] == [False, True]
    assert not site(method="GET").is_replayed


def test_14_a_key_is_of_one_path(drive: Drive, shop: Shop) -> None:
    """With Stripe the same key on another path is an error; here, and in the draft, another key."""
    site = drive(**AS_STRIPE)
    site(KEY, path="/v1/customers")
    assert [site(KEY, path="/v1/charges").status, shop.calls] == [201, 2]
