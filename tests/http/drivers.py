"""Three ways to one application under idempotency keys: ASGI, WSGI and Django, in this process."""

import asyncio
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import django
import httpx
from django.conf import settings
from starlette.requests import Request
from starlette.responses import Response

from oncely.http import IdempotencyKey, WsgiIdempotencyKey
from oncely.ledger import Ledger


@dataclass
class Answering:
    """An application that answers what it is told to, and notes what it was asked."""

    status: int = 201
    fields: Sequence[tuple[str, str]] = (("X-Own", "yes"), ("Set-Cookie", "session=1"))
    body: bytes = b'{"paid": 1}'
    error: Exception | None = None
    asked: list[bytes] = field(default_factory=list)
    before: Callable[[], object] = lambda: None

    def answer(self, body: bytes) -> tuple[int, Sequence[tuple[str, str]], bytes]:
        """What it answers now."""
        self.asked.append(body)
        self.before()
        if self.error is not None:
            raise self.error
        return self.status, self.fields, self.body


Drive = Callable[..., "Driver"]


class Driver:
    """Posts to the application, whatever it stands behind."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __call__(
        self,
        key: str | None = '"k1"',
        content: bytes = b"{}",
        path: str = "/pay",
        method: str = "POST",
        fields: Mapping[str, str] = {},
    ) -> httpx.Response:
        """The answer to one request."""
        headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
        headers += [] if key is None else [(b"Idempotency-Key", key.encode("latin-1"))]

        async def send() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://test") as own:
                return await own.request(method, path, headers=headers, content=content)

        if isinstance(self._transport, httpx.ASGITransport):
            return asyncio.run(send())
        with httpx.Client(transport=self._transport, base_url="http://test") as client:
            return client.request(method, path, headers=headers, content=content)


def by_asgi(app: Answering, ledger: Ledger, **options: Any) -> Driver:
    """Behind ASGI."""

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        status, fields, body = app.answer(await Request(scope, receive).body())
        response = Response(body, status)
        for name, value in fields:
            response.headers.append(name, value)
        await response(scope, receive, send)

    keyed = IdempotencyKey(inner, ledger, consumer="api", **options)
    return Driver(httpx.ASGITransport(app=keyed, raise_app_exceptions=False))


def by_wsgi(app: Answering, ledger: Ledger, **options: Any) -> Driver:
    """Behind WSGI."""

    def inner(environ: Any, start_response: Any) -> list[bytes]:
        status, fields, body = app.answer(environ["wsgi.input"].read())
        start_response(f"{status} Said", [*fields, ("Content-Length", str(len(body)))])
        return [body]

    keyed = WsgiIdempotencyKey(inner, ledger, consumer="api", **options)

    def server(environ: Any, start_response: Any) -> Any:
        try:
            return keyed(environ, start_response)
        except Exception:  # noqa: BLE001 - as servers do.
            start_response("500 Error", [])
            return [b""]

    return Driver(httpx.WSGITransport(app=server))


def by_django(app: Answering, ledger: Ledger, **options: Any) -> Driver:
    """Behind Django, by its own WSGI."""
    from django.http import HttpResponse

    def view(request: Any, **_: Any) -> HttpResponse:
        status, fields, body = app.answer(request.body)
        response = HttpResponse(body, status=status)
        for name, value in fields:
            if name == "Set-Cookie":
                response.set_cookie("session", "1")
            else:
                response[name] = value
        return response

    _configure(view, {"ledger": ledger, "consumer": "api", **options})
    from django.core.handlers.wsgi import WSGIHandler

    return Driver(httpx.WSGITransport(app=WSGIHandler()))


def _configure(view: Any, oncely: Mapping[str, Any]) -> None:
    if not settings.configured:
        settings.configure()
    settings.ALLOWED_HOSTS = ["*"]
    settings.SECRET_KEY = "tests"
    settings.DEBUG_PROPAGATE_EXCEPTIONS = False
    settings.MIDDLEWARE = ["oncely.http.DjangoIdempotencyKey"]
    settings.ONCELY = dict(oncely)
    django.setup()
    from django.urls import clear_url_caches, re_path, set_urlconf

    urls = types.ModuleType("urls")
    urls.urlpatterns = [re_path(r"^.*$", view)]  # type: ignore[attr-defined]
    settings.ROOT_URLCONF = urls
    clear_url_caches()
    set_urlconf(None)
