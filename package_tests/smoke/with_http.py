"""A request with an idempotency key, twice; a webhook, twice; with no web framework."""

import hashlib
import hmac
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import oncely
from oncely.http import WsgiIdempotencyKey, github, webhook

paid: list[bytes] = []
ledger = oncely.open_ledger("sqlite:///oncely.db")
ledger.migrate()


def pay(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """The application."""
    paid.append(environ["wsgi.input"].read())
    start_response("201 Created", [("Content-Type", "text/plain")])
    return [b"receipt"]


def post() -> tuple[str, bytes]:
    """The application's answer to one request."""
    answered: list[str] = []

    def start_response(status: str, *_: Any) -> Any:
        answered.append(status)

    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/payments",
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": BytesIO(b"99"),
        "CONTENT_LENGTH": "2",
        "HTTP_IDEMPOTENCY_KEY": '"8e03978e-40d5-43e8-bc93-6894a57f9324"',
    }
    pieces = application(environ, start_response)
    return answered[0], b"".join(pieces)


application = WsgiIdempotencyKey(pay, ledger, consumer="api")
assert post() == post() == ("201 Created", b"receipt")
assert paid == [b"99"]

endpoint = webhook(ledger, queue="hooks", verify=github("a secret"))
body = b'{"action": "opened"}'
headers = {
    "X-GitHub-Delivery": "1",
    "X-GitHub-Event": "issues",
    "X-Hub-Signature-256": "sha256=" + hmac.new(b"a secret", body, hashlib.sha256).hexdigest(),
}
assert {endpoint.receive("POST", headers, body).status for _ in range(2)} <= {200, 202}
consumer = oncely.Consumer("sqlite:///oncely.db", "hooks").idempotent(ledger, "hooks")
assert consumer.consume(lambda message: None, drain=True).handled == 1
