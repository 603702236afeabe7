"""What every answer says to browsers: run nothing but ours, show it in no frame, keep nothing."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_SOURCES: Mapping[str, str] = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS: Mapping[str, str] = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _SOURCES.items()),
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    # Not no-referrer: with that a browser would not say of which site a form is, either.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_NOT_KEPT = (b"cache-control", b"no-store")


class SafetyHeaders:
    """Adds the headers to whatever `app` answers; pages are kept nowhere."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        await self._app(scope, receive, _adding(send) if scope["type"] == "http" else send)


def _adding(send: Send) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    async def add(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (name, value) for name, value in message["headers"] if name.decode() not in _HEADERS
            ]
            headers += [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            if all(name != _NOT_KEPT[0] for name, _ in headers):
                headers.append(_NOT_KEPT)
            message["headers"] = headers
        await send(message)

    return add
