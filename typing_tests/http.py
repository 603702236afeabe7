"""Idempotency keys and webhooks: options are checked by name and type."""

from collections.abc import Iterable
from typing import Any, assert_type

from sqlalchemy.orm import Session

import oncely
from oncely.http import (
    HttpAnswer,
    HttpRequest,
    IdempotencyKey,
    RequestState,
    Verifier,
    Webhook,
    WsgiIdempotencyKey,
    github,
    header_id,
    hmac_sha256,
    idempotency_headers,
    keyed,
    stripe,
    webhook,
)


async def asgi(scope: Any, receive: Any, send: Any) -> None: ...


def wsgi(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    return [b""]


def user_of(request: HttpRequest) -> str | None:
    return request.headers.get("x-user")


def idempotency_keys(ledger: oncely.Ledger) -> None:
    app = IdempotencyKey(
        asgi, ledger, consumer="api", methods=("POST",), scope=user_of, max_body="1MiB"
    )
    assert_type(app, IdempotencyKey)
    # An application again, for the next middleware.
    IdempotencyKey(app, ledger, consumer="outer")
    WsgiIdempotencyKey(wsgi, ledger, consumer="api", required=True, keep_4xx=[404])


def misuse(ledger: oncely.Ledger) -> None:
    IdempotencyKey(asgi, ledger)  # type: ignore[call-arg]
    IdempotencyKey(asgi, ledger, consumer="api", require=True)  # type: ignore[call-arg]
    IdempotencyKey(asgi, ledger, consumer="api", required="yes")  # type: ignore[arg-type]
    WsgiIdempotencyKey(wsgi, "sqlite:///oncely.db", consumer="api")  # type: ignore[arg-type]


def webhooks(ledger: oncely.Ledger) -> None:
    assert_type(github("secret"), Verifier)
    assert_type(stripe(["new", "old"], tolerance="5m"), Verifier)
    signed = hmac_sha256("secret", "X-Signature", header_id("X-Delivery"))
    endpoint = webhook(ledger, queue="hooks", verify=signed)
    assert_type(endpoint, Webhook)
    assert_type(endpoint.receive("POST", {}, b""), HttpAnswer)
    webhook(ledger, queue="hooks", verify="secret")  # type: ignore[arg-type]
    webhook(ledger, verify=signed)  # type: ignore[call-arg]


def in_a_handler(state: RequestState, session: Session, answer: tuple[bytes, int]) -> None:
    with state.transaction(session) as inbox:
        assert_type(inbox, oncely.Inbox)
    assert_type(state.respond(answer), tuple[bytes, int])
    assert_type(idempotency_headers("charge"), dict[str, str])
    assert_type(keyed(session), Session)
