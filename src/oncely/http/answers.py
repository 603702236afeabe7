"""HTTP responses of any framework, and how they are stored as JSON to be replayed."""

import base64
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from oncely.core.errors import MessageError

NEVER_REPLAYED = frozenset(
    {
        # Fields of one connection (RFC 9110, 7.6.1), or of the moment.
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "date", "age", "server", "via", "alt-svc"),
        # Another client may repeat the request.
        *("set-cookie", "set-cookie2", "www-authenticate", "proxy-authenticate"),
        *("proxy-authentication-info", "authentication-info", "clear-site-data"),
    }
)
"""Header fields that are never replayed, in lower case."""

EVENT_STREAM = "text/event-stream"
"""The media type of endless responses: they are not held back at all."""
HELD_S = 1.0
"""Seconds that a response without a length is held back: one that takes longer is streamed. Other
middleware removes the length of responses that are not streamed, and sends them in pieces."""
STREAMED = "it is streamed"
"""The reason why such a response is not kept."""

REPLAYED = ("Idempotency-Replayed", "true")
"""The field that tells a client that a response is a replay of the first one."""
REPLAYED_AS_STRIPE_SAYS = ("Idempotent-Replayed", "true")
"""The same field, as clients of Stripe and of the Agentic Commerce Protocol expect it."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole HTTP response."""

    status: int
    fields: Sequence[tuple[str, str]] = ()
    body: bytes = b""

    @property
    def line(self) -> str:
        """The status with its phrase, as WSGI requires it."""
        try:
            return f"{self.status} {HTTPStatus(self.status).phrase}"
        except ValueError:
            return f"{self.status} Unknown"

    def value_of(self, name: str) -> str | None:
        """The value of the first field of that name."""
        wanted = name.lower()
        return next((value for field, value in self.fields if field.lower() == wanted), None)


def answer_of(response: Any) -> HttpAnswer:
    """A framework's response as HttpAnswer. Raises MessageError for other values, and streams."""
    if isinstance(response, HttpAnswer):
        return response
    status = getattr(response, "status_code", None)
    # Of Starlette, Django, and Flask (Werkzeug).
    bodies = (getattr(response, name, None) for name in ("body", "content", "data"))
    body = next((each for each in bodies if isinstance(each, bytes | bytearray | memoryview)), None)
    if not isinstance(status, int) or body is None:
        raise MessageError(
            f"respond: {type(response).__name__} is not a response with a body; hand over a "
            "Response of your framework, or oncely.http.HttpAnswer(status, headers, body)"
        )
    raw = getattr(response, "raw_headers", None)
    if raw is None:
        fields = [(str(name), str(value)) for name, value in response.headers.items()]
    else:
        fields = as_text(raw)
    return HttpAnswer(status, fields, bytes(body))


def as_text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Header fields of ASGI as text."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def by_name(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Header fields by their names, in lower case; those of one name joined by commas."""
    joined: dict[str, str] = {}
    for name, value in fields:
        lower = name.lower()
        joined[lower] = f"{joined[lower]}, {value}" if lower in joined else value
    return joined


def to_keep(answer: HttpAnswer, not_replayed: Collection[str]) -> dict[str, Any]:
    """A response as JSON, without the fields that are not replayed."""
    kept: dict[str, Any] = {
        "status": answer.status,
        "headers": [[n, v] for n, v in answer.fields if n.lower() not in not_replayed],
    }
    try:
        text = answer.body.decode()
    except UnicodeDecodeError:
        text = "\0"
    # PostgreSQL's jsonb does not accept NUL.
    if "\0" in text:
        kept["base64"] = base64.b64encode(answer.body).decode()
    else:
        kept["body"] = text
    return kept


def to_replay(kept: Any) -> HttpAnswer | None:
    """The stored response; None if no response was stored."""
    match kept:
        case {"status": int(status), "headers": list(headers), "body": str(text)}:
            body = text.encode()
        case {"status": int(status), "headers": list(headers), "base64": str(text)}:
            body = base64.b64decode(text)
        case _:
            return None
    fields = [(str(name), str(value)) for name, value in headers]
    return HttpAnswer(status, fields, body)


def as_replay(answer: HttpAnswer) -> HttpAnswer:
    """The response with the fields that tell a client that it is a replay."""
    fields = [*answer.fields, REPLAYED, REPLAYED_AS_STRIPE_SAYS]
    return HttpAnswer(answer.status, fields, answer.body)
