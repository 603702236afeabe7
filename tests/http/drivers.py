"""One handler behind each middleware: how requests are brought to it without a server."""

import asyncio
import io
import json
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from tests.django_setup import set_up_django

from oncely.core.record import State
from oncely.http import HttpAnswer, IdempotencyKey, WsgiIdempotencyKey
from oncely.ledger.ledger import Ledger

T = TypeVar("T")
Fields = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the handler of a test is shown it."""

    method: str
    path: str
    body: bytes
    accepts: str = ""
    """Its Accept-Encoding."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client gets."""

    status: int
    fields: Fields
    body: bytes

    def value_of(self, name: str) -> str | None:
        """The value of the first header field of that name."""
        return next((value for field, value in self.fields if field.lower() == name.lower()), None)

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def is_replayed(self) -> bool:
        """Whether it says that it is the first request's."""
        return self.value_of("Idempotency-Replayed") == "true"

    @property
    def own(self) -> tuple[int, Fields, bytes]:
        """What is of the application: all but what says that it is replayed."""
        marks = ("idempotency-replayed", "idempotent-replayed")
        kept = [(n.lower(), v) for n, v in self.fields if n.lower() not in marks]
        return self.status, sorted(kept), self.body


class CountedPiece(bytes):
    """A piece of an answer that knows how often its length was asked for."""

    counts = 0

    def __len__(self) -> int:
        self.counts += 1
        return super().__len__()


def states(ledger: Ledger) -> list[State]:
    """Of all records."""
    return [record.state for record in ledger.scan()]


def peak_of(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and how many bytes it took at most."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


Handler = Callable[[Asked], HttpAnswer]


class Shop:
    """A handler that counts its calls, and answers as a test sets it: `answers` one after the
    other, the last again and again.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.answers: list[HttpAnswer] = []

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self.asked)

    def __call__(self, asked: Asked) -> HttpAnswer:
        self.asked.append(asked)
        if len(self.answers) > 1:
            return self.answers.pop(0)
        if self.answers:
            return self.answers[0]
        # Another one each time: what is replayed is told apart from what ran again.
        body = f'{{"call": {self.calls}}}'.encode()
        return HttpAnswer(201, [("Content-Type", "application/json")], body)


Site = Callable[..., Reply]
"""An application with keys, as its clients see it: see `site_of`."""

Drive = Callable[..., Site]
"""(handler, ledger, **options) -> the site."""


def site_of(ask: Callable[[str, str, str, Fields, bytes], Reply]) -> Site:
    """Gives the reply to one request; `key` is the field's value as it stands in the request."""

    def site(
        key: str | None = '"k"',
        body: bytes = b"{}",
        *,
        method: str = "POST",
        path: str = "/orders",
        query: str = "",
        fields: Fields = (),
    ) -> Reply:
        named = [] if key is None else [("Idempotency-Key", key)]
        return ask(method, path, query, [*fields, *named], body)

    return site


# ---- ASGI --------------------------------------------------------------------------------------


def asgi_site(handler: Handler, ledger: Ledger, **options: Any) -> Site:
    """The handler behind IdempotencyKey."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await read_all(receive)
        accepts = dict(scope["headers"]).get(b"accept-encoding", b"").decode()
        asked = Asked(scope["method"], scope["path"], body, accepts)
        # In a thread, so that a handler can bring a request itself.
        answer = await asyncio.to_thread(handler, asked)
        headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in answer.fields]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})

    return asgi_client(IdempotencyKey(app, ledger, **options))


def asgi_client(app: Any) -> Site:
    """What brings requests to an ASGI application."""

    def ask(method: str, path: str, query: str, fields: Fields, body: bytes) -> Reply:
        return asyncio.run(asgi_reply(app, asgi_scope(method, path, query, fields), body))

    return site_of(ask)


def asgi_scope(method: str, path: str, query: str, fields: Fields) -> dict[str, Any]:
    """A request's scope, as servers make it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": quote(path).encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in fields],
        "client": ("127.0.0.1", 5000),
        "server": ("127.0.0.1", 80),
    }


async def asgi_reply(app: Any, scope: Any, *body: bytes, sent: list[Any] | None = None) -> Reply:
    """What an application answers to a body in these pieces; `sent` is filled while it does."""
    sent = [] if sent is None else sent
    gone = asyncio.Event()
    pieces = [*(body or [b""])]

    async def receive() -> Any:
        if not pieces:
            await gone.wait()
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(event: Any) -> None:
        sent.append(event)

    await app(scope, receive, send)
    return reply_of(sent)


def reply_of(sent: Sequence[Any]) -> Reply:
    """The reply that these events are, which is checked to be one whole answer."""
    start, *rest = [each for each in sent if each["type"].startswith("http.response")]
    assert start["type"] == "http.response.start"
    assert [bool(each.get("more_body")) for each in rest] == [True] * (len(rest) - 1) + [False]
    fields = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in start.get("headers", ())]
    return Reply(start["status"], fields, b"".join(each.get("body", b"") for each in rest))


async def read_all(receive: Any) -> bytes:
    """A request's whole body."""
    body, more = b"", True
    while more:
        event = await receive()
        body += event.get("body", b"")
        more = event.get("more_body", False)
    return body


# ---- WSGI --------------------------------------------------------------------------------------


def wsgi_site(handler: Handler, ledger: Ledger, **options: Any) -> Site:
    """The handler behind WsgiIdempotencyKey."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path = environ["PATH_INFO"].encode("latin-1").decode()
        accepts = environ.get("HTTP_ACCEPT_ENCODING", "")
        answer = handler(Asked(environ["REQUEST_METHOD"], path, body, accepts))
        start_response(answer.line, list(answer.fields))
        return [answer.body]

    return wsgi_client(WsgiIdempotencyKey(app, ledger, **options))


def wsgi_client(app: Any) -> Site:
    """What brings requests to a WSGI application."""
    return site_of(lambda *asked: wsgi_reply(app, wsgi_environ(*asked)))


def wsgi_environ(method: str, path: str, query: str, fields: Fields, body: bytes) -> dict[str, Any]:
    """A request's environ, as servers make it."""
    joined: dict[str, str] = {}
    for name, value in fields:
        at = "HTTP_" + name.upper().replace("-", "_")
        joined[at] = f"{joined[at]},{value}" if at in joined else value
    for apart in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if f"HTTP_{apart}" in joined:
            joined[apart] = joined.pop(f"HTTP_{apart}")
    return {
        "REQUEST_METHOD": method,
        "SCRIPT_NAME": "",
        "PATH_INFO": unquote_to_bytes(quote(path)).decode("latin-1"),
        "QUERY_STRING": query,
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        **joined,
    }


def wsgi_reply(app: Any, environ: Any) -> Reply:
    """What an application answers, read and closed as servers do."""
    started: list[Any] = []

    def start_response(line: str, fields: Any, exc_info: Any = None) -> Callable[[bytes], Any]:
        started[:] = [line, list(fields)]
        return lambda _: None

    chunks = app(environ, start_response)
    try:
        body = b"".join(chunks)
    finally:
        if hasattr(chunks, "close"):
            chunks.close()
    line, fields = started
    return Reply(int(line[:3]), fields, body)


# ---- Django ------------------------------------------------------------------------------------


def django_settings(view: Callable[..., Any], **settings: Any) -> Any:
    """Settings, as a context manager, under which Django has one view and this middleware."""
    from django.test import override_settings
    from django.urls import re_path

    set_up_django()
    urls = type("urls", (), {"urlpatterns": [re_path("", view)]})
    settings.setdefault("MIDDLEWARE", ["oncely.http.DjangoIdempotencyKey"])
    return override_settings(ROOT_URLCONF=urls, ALLOWED_HOSTS=["*"], **settings)


def django_site(handler: Handler, ledger: Ledger, **options: Any) -> Site:
    """The handler behind DjangoIdempotencyKey."""
    from django.http import HttpResponse

    def view(request: Any) -> Any:
        accepts = request.headers.get("Accept-Encoding", "")
        answer = handler(Asked(request.method, request.path, request.body, accepts))
        response = HttpResponse(answer.body, status=answer.status)
        del response["Content-Type"]
        for name, value in answer.fields:
            response[name] = value
        return response

    return django_client(view, {"ledger": ledger, **options})


def django_client(view: Callable[..., Any], oncely: Mapping[str, Any], **settings: Any) -> Site:
    """What brings requests to a view of Django, as a WSGI server does."""
    from django.core.handlers.wsgi import WSGIHandler

    settings.setdefault("ONCELY", oncely)
    with django_settings(view, **settings):
        app = wsgi_client(WSGIHandler())

    def site(*arguments: Any, **named: Any) -> Reply:
        with django_settings(view, **settings):
            return app(*arguments, **named)

    return site


DRIVES: Mapping[str, Drive] = {"asgi": asgi_site, "wsgi": wsgi_site, "django": django_site}


def drive_by(kind: str, ledger: Ledger, shop: Shop) -> Drive:
    """Makes a site of `shop`, or of another handler, behind the middleware of that kind."""

    def site(handler: Any = shop, **options: Any) -> Site:
        return DRIVES[kind](handler, ledger, **{"consumer": "api", **options})

    return site
