"""Answers, whatever framework sends them; and how one is kept as JSON, to be given again."""

import base64
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

NEVER_REPLAYED = frozenset(
    {
        # They belong to one connection (RFC 9110, 7.6.1), or to the moment.
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "date", "age", "server", "via", "alt-svc"),
        # Whoever repeats a request may not be who made it.
        *("set-cookie", "set-cookie2", "www-authenticate", "proxy-authenticate"),
        *("proxy-authentication-info", "authentication-info", "clear-site-data"),
    }
)
"""Header fields that no repetition is given, in lower case."""

EVENT_STREAM = "text/event-stream"
"""The media type of answers that have no end: they are not held back at all."""
HELD_S = 1.0
"""Seconds that an answer without a length is held back for its end: what takes longer is streamed.
Other middleware takes answers apart that are not, and removes their length."""

REPLAYED = ("Idempotency-Replayed", "true")
"""What tells a client that an answer is the first request's."""
REPLAYED_AS_STRIPE_SAYS = ("Idempotent-Replayed", "true")
"""The same as clients of Stripe and of the Agentic Commerce Protocol look for it."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer as a whole."""

    status: int
    fields: Sequence[tuple[str, str]] = ()
    body: bytes = b""

    @property
    def line(self) -> str:
        """The status with its phrase, as WSGI wants it."""
        return status_line(self.status)

    def value_of(self, name: str) -> str | None:
        """The value of the first field of that name."""
        wanted = name.lower()
        return next((value for field, value in self.fields if field.lower() == wanted), None)


class HeldBody:
    """What is held back of an answer's body."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.length = 0

    def add(self, piece: bytes) -> None:
        """Hold back what comes next."""
        self._pieces.append(piece)
        self.length += len(piece)

    def let_go(self) -> bytes:
        """All that is held back, which it is no longer."""
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.length = 0
        return body


def status_line(status: int) -> str:
    """A status with its phrase."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def to_keep(answer: HttpAnswer, not_replayed: Collection[str]) -> dict[str, Any]:
    """An answer as JSON, without the fields that are not given again."""
    kept: dict[str, Any] = {
        "status": answer.status,
        "headers": [[n, v] for n, v in answer.fields if n.lower() not in not_replayed],
    }
    try:
        text = answer.body.decode()
    except UnicodeDecodeError:
        text = "\0"
    # NUL is what PostgreSQL's jsonb does not take.
    if "\0" in text:
        kept["base64"] = base64.b64encode(answer.body).decode()
    else:
        kept["body"] = text
    return kept


def to_replay(kept: Any) -> HttpAnswer | None:
    """The answer that was kept; None where none was, or something else."""
    match kept:
        case {"status": int(status), "headers": list(headers), "body": str(text)}:
            body = text.encode()
        case {"status": int(status), "headers": list(headers), "base64": str(text)}:
            body = base64.b64decode(text)
        case _:
            return None
    fields = [(str(name), str(value)) for name, value in headers]
    return HttpAnswer(status, [*fields, REPLAYED, REPLAYED_AS_STRIPE_SAYS], body)
