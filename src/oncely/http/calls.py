"""HTTP calls of handlers: the same idempotency key in every attempt."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from oncely.core.errors import ConfigError, MessageError
from oncely.core.message import current
from oncely.core.waiting import digest
from oncely.http.header_field import FIELD, write_key

C = TypeVar("C")

_METHODS = frozenset({"POST", "PATCH"})


def idempotency_headers(step: str | None = None, *, quoted: bool = True) -> dict[str, str]:
    """The Idempotency-Key header field for a call that the handler makes, as a dict.

    The key is made of the message that is processed, and of `step` if the handler makes several
    calls. It is in quotation marks, as the standard says. `quoted=False` is for services that take
    the key as it is and limit its length to 64 characters, which is its own. Raises MessageError
    outside a handler.
    """
    processing = current()
    key = processing.idempotency_key if step is None else processing.step_key(step)
    return {FIELD: write_key(key) if quoted else key}


def keyed(client: C, *, quoted: bool = True) -> C:
    """Return `client`: from now on its POST and PATCH requests carry an idempotency key, if a
    handler makes them and has not set one.

    `client` is a Client or AsyncClient of httpx, or a Session of requests. The key is made of the
    message that is processed and of the request's method, URL and body. If a handler makes the
    same call twice, give each a key of its own by `idempotency_headers`. Outside a handler no key
    is added. Raises ConfigError for any other client.
    """
    add = partial(_add_key, quoted=quoted)
    if hasattr(client, "event_hooks"):
        _hook(client, add)
    elif hasattr(client, "adapters") and hasattr(client, "mount"):
        from oncely.http.requests_adapter import KeyedAdapter

        for prefix, adapter in [*client.adapters.items()]:
            client.mount(prefix, KeyedAdapter(adapter, add))
    else:
        raise ConfigError(
            f"keyed: a {type(client).__name__} is not a client of httpx, nor a Session of requests"
        )
    return client


Adds = Callable[[Any, Callable[[], bytes]], None]
"""Adds a key to a request; the function reads the request's body."""


def _add_key(request: Any, body: Callable[[], bytes], *, quoted: bool) -> None:
    try:
        processing = current()
    except MessageError:
        return
    if request.method in _METHODS and FIELD not in request.headers:
        name = digest(request.method, str(request.url), body().hex())
        key = processing.step_key(f"call {name}")
        request.headers[FIELD] = write_key(key) if quoted else key


def _hook(client: Any, add: Adds) -> None:
    def before(request: Any) -> None:
        add(request, request.read)

    async def before_async(request: Any) -> None:
        body = await request.aread()
        add(request, lambda: body)

    import httpx

    hook = before_async if isinstance(client, httpx.AsyncClient) else before
    hooks = client.event_hooks
    client.event_hooks = {**hooks, "request": [*hooks.get("request", ()), hook]}
