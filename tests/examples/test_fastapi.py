"""The starter for FastAPI: a charge that is sent again, and an event that Stripe delivers again."""

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import stripe
from tests.conditions import wait_until
from tests.examples.running import Starter

EVENT = json.dumps({"id": "evt_17", "object": "event", "type": "payment_intent.succeeded"})


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Starter]:
    """Its server runs."""
    starter = Starter("fastapi", tmp_path)
    with starter.serving():
        yield starter


def rows(shop: Starter, table: str) -> int:
    """How many are committed."""
    with closing(sqlite3.connect(shop.folder / "out" / "shop.db")) as connection:
        [count] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    return int(count)


def charge(shop: Starter, key: str, cents: int = 9900) -> httpx.Response:
    """Ask for a charge."""
    asked = {"customer": "anna", "cents": cents}
    headers = {"Idempotency-Key": f'"{key}"'}
    return httpx.post(f"{shop.url}/charges", json=asked, headers=headers, timeout=60)


def deliver(shop: Starter, secret: str = "whsec_example") -> int:
    """Deliver the event as Stripe signs it; the status of the answer."""
    now = int(time.time())
    signature = stripe.WebhookSignature._compute_signature(f"{now}.{EVENT}", secret)
    headers = {"Stripe-Signature": f"t={now},v1={signature}"}
    return httpx.post(
        f"{shop.url}/hooks/stripe", content=EVENT, headers=headers, timeout=60
    ).status_code


def test_a_charge_is_made_once(shop: Starter) -> None:
    """A repetition gets the first answer; another charge under the key is refused."""
    first, again, other = charge(shop, "17"), charge(shop, "17"), charge(shop, "17", 1)
    assert (first.status_code, first.json()) == (201, {"charge": 1})
    assert (again.status_code, again.content) == (201, first.content)
    assert "Idempotency-Replayed" not in first.headers
    assert again.headers["Idempotency-Replayed"] == "true"
    assert other.status_code == 422
    assert rows(shop, "charges") == 1
    assert charge(shop, "18").json() == {"charge": 2}


def test_an_event_is_handled_once(shop: Starter) -> None:
    """Stored at its first delivery, known at the second, refused without the secret."""
    assert deliver(shop, "whsec_another") == 401
    assert (deliver(shop), deliver(shop)) == (202, 200)
    wait_until(lambda: rows(shop, "payments"))
    # What was delivered after it has been seen to: only one row was written for the first two.
    assert rows(shop, "payments") == 1


def test_as_the_readme_shows_it(shop: Starter) -> None:
    """`make try` sends both twice, with a signature of its own."""
    answers = shop.make("try", PORT=shop.url.rpartition(":")[2]).splitlines()
    statuses = [line.split(" ")[1] for line in answers if line.startswith("HTTP/")]
    assert statuses == ["201", "201", "202", "200"]
    assert answers.count('{"charge":1}') == 2
    wait_until(lambda: rows(shop, "payments"))
