"""An adapter for sessions of requests: adds idempotency keys, and lets another adapter send."""

from typing import Any

from requests import PreparedRequest, Response
from requests.adapters import BaseAdapter

from oncely.http.calls import Adds


class KeyedAdapter(BaseAdapter):
    """Adds a key, and sends by `adapter`, whose settings and retries stay."""

    def __init__(self, adapter: BaseAdapter, add: Adds) -> None:
        super().__init__()
        self._adapter = adapter
        self._add = add

    def send(self, request: PreparedRequest, *args: Any, **kwargs: Any) -> Response:
        """Add a key to the request, and send it."""
        self._add(request, lambda: _body(request))
        return self._adapter.send(request, *args, **kwargs)

    def close(self) -> None:
        """Close the adapter that sends."""
        self._adapter.close()


def _body(request: PreparedRequest) -> bytes:
    body = request.body or b""
    # The body of a file is not read: only method and URL tell such requests apart.
    return body.encode() if isinstance(body, str) else body if isinstance(body, bytes) else b""
