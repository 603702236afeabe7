"""An adapter for sessions of requests, which adds idempotency keys before another one sends."""

from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter

from oncely.http.calls import Adds


class KeyedAdapter(BaseAdapter):
    """Adds a key, and sends as `adapter` does, whose settings and retries stay."""

    def __init__(self, adapter: BaseAdapter, add: Adds) -> None:
        super().__init__()
        self._adapter = adapter
        self._add = add

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Send it."""
        self._add(request, lambda: _body(request))
        return self._adapter.send(request, *args, **kwargs)

    def close(self) -> None:
        """Close what sends."""
        self._adapter.close()


def _body(request: PreparedRequest) -> bytes:
    body = request.body or b""
    # What is read from a file is told apart by where it goes alone.
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else b""
