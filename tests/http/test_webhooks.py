"""Webhooks: verified, stored once, handled once by a consumer of the queue."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import stripe as stripe_package
from standardwebhooks import Webhook as StandardWebhook
from tests.conditions import wait_until
from tests.http.conftest import on_a_server_too
from tests.integration.callers import Place

from oncely import http
from oncely.consumer import Consumer
from oncely.core.errors import ConfigError
from oncely.core.message import Message
from oncely.ledger.ledger import Ledger, open_ledger

SECRET = "a secret that both know"
BODY = b'{"id": "evt_1", "type": "payment_intent.succeeded", "event_id": "Ev1", "event": {}}'
STANDARD_SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def digest_of(signed: bytes, secret: str = SECRET) -> bytes:
    return hmac.new(secret.encode(), signed, hashlib.sha256).digest()


def by_github(body: bytes, message_id: str, _: float) -> dict[str, str]:
    return {
        "X-GitHub-Delivery": message_id,
        "X-GitHub-Event": "push",
        "X-Hub-Signature-256": f"sha256={digest_of(body).hex()}",
    }


def by_stripe(body: bytes, _: str, now: float) -> dict[str, str]:
    signed = f"{int(now)}.{body.decode()}"
    signature = stripe_package.WebhookSignature._compute_signature(signed, SECRET)
    return {"Stripe-Signature": f"t={int(now)},v1=00,v1={signature},v0=old"}


def by_standard_webhooks(body: bytes, message_id: str, now: float) -> dict[str, str]:
    when = datetime.fromtimestamp(int(now), UTC)
    signature = StandardWebhook(STANDARD_SECRET).sign(message_id, when, body.decode())
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(now)),
        "webhook-signature": f"v1,bm9uZQ== {signature} v1a,other",
    }


def by_slack(body: bytes, _: str, now: float) -> dict[str, str]:
    signature = digest_of(f"v0:{int(now)}:".encode() + body).hex()
    return {"X-Slack-Request-Timestamp": str(int(now)), "X-Slack-Signature": f"v0={signature}"}


def by_shopify(body: bytes, message_id: str, _: float) -> dict[str, str]:
    return {
        "X-Shopify-Webhook-Id": message_id,
        "X-Shopify-Topic": "orders/create",
        "X-Shopify-Hmac-Sha256": base64.b64encode(digest_of(body)).decode(),
    }


def by_anybody(body: bytes, message_id: str, _: float) -> dict[str, str]:
    return {"X-Delivery": message_id, "X-Signature": digest_of(body).hex()}


# Of each: how it is verified, how it signs, the message's id and type, and its signature's field.
SENDERS = {
    "github": (http.github(SECRET), by_github, "d-1", "push", "X-Hub-Signature-256"),
    "stripe": (
        http.stripe(SECRET),
        by_stripe,
        "evt_1",
        "payment_intent.succeeded",
        "Stripe-Signature",
    ),
    "standard webhooks": (
        http.standard_webhooks(STANDARD_SECRET),
        by_standard_webhooks,
        "d-1",
        "payment_intent.succeeded",
        "webhook-signature",
    ),
    "slack": (http.slack(SECRET), by_slack, "Ev1", "", "X-Slack-Signature"),
    "shopify": (http.shopify(SECRET), by_shopify, "d-1", "orders/create", "X-Shopify-Hmac-Sha256"),
    "anybody": (
        http.hmac_sha256(SECRET, "X-Signature", http.header_id("X-Delivery")),
        by_anybody,
        "d-1",
        "",
        "X-Signature",
    ),
}
TIMED = ("stripe", "standard webhooks", "slack")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    return ledger


# ---- Three ways to the same endpoint -------------------------------------------------------------

Posts = Callable[[http.Webhook, Mapping[str, str], bytes], httpx.Response]


def encoded(fields: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]


def by_asgi(hook: http.Webhook, fields: Mapping[str, str], body: bytes) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(app=hook)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", headers=encoded(fields), content=body)

    return asyncio.run(post())


def by_wsgi(hook: http.Webhook, fields: Mapping[str, str], body: bytes) -> httpx.Response:
    transport = httpx.WSGITransport(app=hook.wsgi)
    with httpx.Client(transport=transport, base_url="http://test") as client:
        return client.post("/", headers=encoded(fields), content=body)


def by_function(hook: http.Webhook, fields: Mapping[str, str], body: bytes) -> httpx.Response:
    answer = hook.receive("POST", fields, body)
    return httpx.Response(answer.status, headers=[*answer.fields], content=answer.body)


WAYS = [by_asgi, by_wsgi, by_function]
by_each_way = pytest.mark.parametrize("post", WAYS)
each_sender_and_way = pytest.mark.parametrize(
    ("sender", "post"),
    [*((name, by_asgi) for name in SENDERS), *(("github", way) for way in WAYS[1:])],
)
"""Each sender by one way, and each way with one sender."""


def queued(ledger: Ledger) -> list[Message]:
    """The messages in the queue."""
    return [row.message for row in ledger.mailbox.listed("queue/hooks", 100)]


@each_sender_and_way
def test_stored_once(ledger: Ledger, post: Posts, sender: str) -> None:
    """The first delivery is stored, its id and type with it; each further one is told so."""
    verify, sign, message_id, type_, _ = SENDERS[sender]
    hook = http.webhook(ledger, queue="hooks", verify=verify)
    fields = {**sign(BODY, "d-1", time.time()), "Authorization": "Bearer x", "Cookie": "a=b"}
    answers = [post(hook, fields, BODY).status_code for _ in range(3)]
    assert answers == [202, 200, 200]
    [message] = queued(ledger)
    assert (message.id, message.type, message.body) == (message_id, type_, BODY)
    assert not {"authorization", "cookie"} & {name.lower() for name in message.headers}


@each_sender_and_way
def test_wrong_signature(ledger: Ledger, post: Posts, sender: str) -> None:
    """Another body, another secret, or none: refused before anything is read of it."""
    verify, sign, _, _, field = SENDERS[sender]
    hook = http.webhook(ledger, queue="hooks", verify=verify)
    good = sign(BODY, "d-1", time.time())
    without = {name: value for name, value in good.items() if name != field}
    for fields, body in (
        *((good, BODY + b" "), (without, BODY), ({**good, field: "v1=,t=1"}, b"no JSON")),
    ):
        assert post(hook, fields, body).status_code == 401
    assert by_asgi(hook, {**good, field: "é"}, BODY).status_code == 401
    assert queued(ledger) == []


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize(("off_s", "status"), [(-240, 202), (240, 202), (-360, 401), (360, 401)])
def test_time(ledger: Ledger, name: str, off_s: float, status: int) -> None:
    """What was signed long ago, or is to be signed, is not taken: it may be played again."""
    verify, sign, *_ = SENDERS[name]
    hook = http.webhook(ledger, queue="hooks", verify=verify)
    fields = sign(BODY, "d-1", time.time() + off_s)
    assert by_function(hook, fields, BODY).status_code == status


def test_one_secret_after_another(ledger: Ledger) -> None:
    """While a secret is replaced, both are good."""
    hook = http.webhook(ledger, queue="hooks", verify=http.github(["new", SECRET]))
    fields = by_github(BODY, "d-1", 0)
    assert by_function(hook, fields, BODY).status_code == 202
    alone = http.webhook(ledger, queue="hooks", verify=http.github("new"))
    assert by_function(alone, fields, BODY).status_code == 401


@by_each_way
def test_what_is_no_message(ledger: Ledger, post: Posts) -> None:
    """Without an id, or with one that cannot be: refused with its reason. Too large: before the
    signature is looked at.
    """
    hook = http.webhook(ledger, queue="hooks", verify=http.github(SECRET), max_body=100)
    for message_id in ("", " ", "x" * 256):
        answer = post(hook, by_github(BODY, message_id, 0), BODY)
        assert answer.status_code == 400, message_id
        assert "id" in answer.text
    large = b"x" * 101
    assert post(hook, by_github(large, "d-1", 0), large).status_code == 413
    stripe_hook = http.webhook(ledger, queue="hooks", verify=http.stripe(SECRET))
    for body in (b"[]", b"no JSON", b'{"id": 7}', b"{}"):
        answer = post(stripe_hook, by_stripe(body, "", time.time()), body)
        assert answer.status_code == 400, body
    assert hook.receive("GET", {}, b"").status == 405
    assert queued(ledger) == []


@by_each_way
def test_challenge_of_slack(ledger: Ledger, post: Posts) -> None:
    """Slack's question is answered, where it is signed, and is not a message."""
    hook = http.webhook(ledger, queue="hooks", verify=http.slack(SECRET))
    body = b'{"type": "url_verification", "challenge": "3eZbrw1a"}'
    answer = post(hook, by_slack(body, "", time.time()), body)
    assert (answer.status_code, answer.text) == (200, "3eZbrw1a")
    assert post(hook, by_slack(b"{}", "", time.time()), body).status_code == 401
    assert queued(ledger) == []


def test_store_away(private_postgresql: Any) -> None:
    """A delivery that cannot be stored is to come again, and is stored then."""
    ledger = open_ledger(private_postgresql.url)
    ledger.migrate()
    hook = http.webhook(ledger, queue="hooks", verify=http.github(SECRET), timeout="1s")
    private_postgresql.stop()
    answer = by_asgi(hook, by_github(BODY, "d-1", 0), BODY)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    private_postgresql.start()
    fields = by_github(BODY, "d-1", 0)
    wait_until(lambda: by_asgi(hook, fields, BODY).status_code in (200, 202))
    assert [message.id for message in queued(ledger)] == ["d-1"]
    hook._threads.shutdown()  # What was begun first goes on, maybe until now.
    ledger.close()


@on_a_server_too
def test_two_at_once(place: Place) -> None:
    """Of many equal deliveries at one time one is stored; none is refused for good."""
    hook = http.webhook(place.ledger, queue="hooks", verify=http.github(SECRET))
    fields = by_github(BODY, "d-1", 0)

    async def post_all() -> list[int]:
        transport = httpx.ASGITransport(app=hook)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            posting = [client.post("/", headers=fields, content=BODY) for _ in range(20)]
            return [answer.status_code for answer in await asyncio.gather(*posting)]

    statuses = asyncio.run(post_all())
    assert statuses.count(202) == 1
    assert set(statuses) <= {200, 202, 503}
    assert [message.id for message in queued(place.ledger)] == ["d-1"]


@on_a_server_too
def test_deliveries_are_handled_once(place: Place) -> None:
    """Deliveries of GitHub, some of them twice, come to a consumer once each."""
    hook = http.webhook(place.ledger, queue="hooks", verify=http.github(SECRET))
    made = [(f"d-{n}", json.dumps({"ref": n, "é": "…"}).encode()) for n in range(60)]
    for message_id, body in [*made, *made[::3]]:
        assert by_function(hook, by_github(body, message_id, 0), body).status_code in (200, 202)
    handled: list[tuple[str, bytes]] = []
    report = (
        Consumer(place.url, queue="hooks")
        .idempotent(place.ledger, "ci")
        .consume(lambda message: handled.append((message.id, message.body)), drain=True)
    )
    assert sorted(handled) == sorted(made)
    assert (report.handled, report.duplicates) == (60, 0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"queue": ""}, "queue"),
        ({"verify": print}, "verify"),
        ({"ledger": "memory://"}, "not a Ledger"),
        ({"max_body": "1 apple"}, "max_body: '1 apple' is not a size"),
        ({"message_id": "X-Id"}, r'message_id: .* write message_id=header_id\("X-Id"\)'),
    ],
)
def test_mistakes(ledger: Ledger, how: dict[str, Any], text: str) -> None:
    """What cannot be meant is told at once."""
    options: Any = {"ledger": ledger, "queue": "q", "verify": http.github("s"), **how}
    with pytest.raises(ConfigError, match=text):
        http.webhook(**options)
