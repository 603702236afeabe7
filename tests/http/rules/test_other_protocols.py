"""What Stripe's page on idempotent requests (https://docs.stripe.com/api/idempotent_requests) and
section 6 of the Agentic Commerce Protocol ask beside the draft: what holds by a setting.
"""

from typing import Any

import pytest
from tests.http.drivers import Asked, Drive, Reply, Shop

from oncely.http import HttpAnswer, acp_json

AS_STRIPE: dict[str, Any] = {
    "methods": ["POST"],
    "keep_4xx": True,
    "keep_5xx": True,
}
KEY = "KG5LxwFBepaKHyUD"


@pytest.mark.parametrize("key", [KEY, "k" * 255, "a.b:c=d/e", f" {KEY}"])
def test_keys_stand_without_quotation_marks(drive: Drive, key: str) -> None:
    """And with them it is the same key; with `bare_keys=False` a key has them."""
    site = drive(**AS_STRIPE)
    assert [site(key).is_replayed, site(key).is_replayed] == [False, True]
    assert site(f'"{key.strip()}"').is_replayed
    assert [site("a,b").status, site("k" * 256).status, drive(bare_keys=False)(key).status] == [
        400
    ] * 3


def test_delete_may_have_keys(drive: Drive) -> None:
    """Stripe ignores keys of GET and DELETE; here each method can be named, also DELETE."""
    site = drive(methods=["POST", "DELETE"])
    assert [site(method="DELETE").is_replayed, site(method="DELETE").is_replayed] == [False, True]
    assert not site(method="GET").is_replayed


def test_errors_of_the_agentic_commerce_protocol(drive: Drive, shop: Shop) -> None:
    """Flat errors, each with a message and the code of the protocol, for every POST."""
    replies: list[Reply] = []

    def slow(asked: Asked) -> HttpAnswer:
        replies.append(site(KEY))
        return shop(asked)

    site = drive(slow, methods=["POST"], errors=acp_json, required=True)
    assert site(KEY).status == 201
    replies += [site(None), site("k" * 256), site(KEY, b"other")]
    assert [(reply.status, reply.json()["code"]) for reply in replies] == [
        (409, "idempotency_in_flight"),
        (400, "idempotency_key_required"),
        (400, "idempotency_key_invalid"),
        (422, "idempotency_conflict"),
    ]
    assert {reply.json()["type"] for reply in replies} == {"invalid_request"}
    assert all(reply.json()["message"] for reply in replies)
    assert (replies[0].value_of("Retry-After") or "").isdigit()
    assert site(None, method="GET").status == 201
