"""Hostile clients, and clumsy views, around DjangoIdempotencyKey: sync, and async."""

import asyncio
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.utils.asyncio import async_unsafe
from tests.conditions import wait_until_async
from tests.http.drivers import (
    Reply,
    Site,
    asgi_client,
    asgi_scope,
    django_client,
    django_settings,
    states,
)

from oncely.core.errors import ConfigError
from oncely.core.record import State
from oncely.http import IdempotencyKey
from oncely.ledger.ledger import Ledger

DjangoSite = Callable[..., Site]


def async_client(view: Callable[..., Any], oncely: dict[str, Any], **settings: Any) -> Site:
    """What brings requests to a view of Django, as an ASGI server does."""
    settings.setdefault("ONCELY", oncely)
    with django_settings(view, **settings):
        handler = ASGIHandler()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await handler(scope, receive, send)

    def site(*arguments: Any, **named: Any) -> Reply:
        with django_settings(view, **settings):
            return asgi_client(app)(*arguments, **named)

    return site


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest, ledger: Ledger) -> DjangoSite:
    """Makes a site of a view."""
    client = {"wsgi": django_client, "asgi": async_client}[request.param]
    return lambda view, **settings: client(view, {"ledger": ledger, "consumer": "api"}, **settings)


def test_an_answer_is_replayed(site: DjangoSite) -> None:
    """Whichever server Django runs under, and its view sees the key."""
    keys = []

    def view(request: Any) -> Any:
        keys.append(request.oncely.key)
        response = JsonResponse({"order": len(keys)}, status=201)
        response.set_cookie("session", "of the first")
        return response

    asked = site(view)
    first, again = asked(), asked()
    assert [first.status, first.json(), again.body] == [201, {"order": 1}, first.body]
    assert [again.is_replayed, keys] == [True, ["k"]]
    assert first.value_of("Set-Cookie")
    assert again.value_of("Set-Cookie") is None


def test_a_view_that_returns_nothing_has_failed(site: DjangoSite, ledger: Ledger) -> None:
    assert site(lambda request: None)().status == 500
    assert states(ledger) == [State.FAILED]


def test_a_form_can_be_read(site: DjangoSite) -> None:
    """Its body was read for the fingerprint before."""

    def view(request: Any) -> Any:
        return HttpResponse(request.POST["amount"])

    fields = [("Content-Type", "application/x-www-form-urlencoded")]
    asked = site(view)
    assert asked(body=b"amount=7", fields=fields).body == b"7"
    assert asked(body=b"amount=8", fields=fields).status == 422


def test_a_large_upload_is_handled(site: DjangoSite) -> None:
    """Django limits what it holds in memory, and not a form's files: nor do keys limit them. What
    is too large for the view is the view's to say.
    """

    def view(request: Any) -> Any:
        return HttpResponse(request.FILES["file"].read() if request.FILES else request.body)

    asked = site(view)
    file = bytes(range(256)) * 20_000
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        + file
        + b"\r\n--b--\r\n"
    )
    fields = [
        ("Content-Type", "multipart/form-data; boundary=b"),
        ("Content-Length", str(len(body))),
    ]
    first, again = (asked(body=body, fields=fields) for _ in range(2))
    assert [first.status, first.body == file, again.status] == [200, True, 409]
    other = asked(body=body.replace(b"\x01\x02", b"\x02\x01", 1), fields=fields)
    assert other.status == 422
    assert asked('"large"', body=file).status == 400


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """MIDDLEWARE with one of a test's own around oncely's."""

    def around(middleware: Any) -> list[str]:
        monkeypatch.setitem(sys.modules, "outer", types.SimpleNamespace(outer=middleware))
        return ["outer.outer", "oncely.http.DjangoIdempotencyKey"]

    return around


def test_a_body_that_was_read_before_is_a_mistake(
    ledger: Ledger, chain: Callable[[Any], list[str]]
) -> None:
    """Nothing would tell two requests apart."""

    def reading(get_response: Any) -> Any:
        return lambda request: get_response(request) if request.read() else None

    asked = django_client(
        lambda request: HttpResponse(),
        {"ledger": ledger, "consumer": "api"},
        MIDDLEWARE=chain(reading),
        DEBUG_PROPAGATE_EXCEPTIONS=True,
    )
    with pytest.raises(ConfigError, match=r"put .* before it"):
        asked()
    assert states(ledger) == []


def test_a_body_that_was_cut_off_and_read_before(
    site: DjangoSite, ledger: Ledger, chain: Callable[[Any], list[str]]
) -> None:
    """It is as incomplete where a middleware around this one has read it first."""

    def noting(get_response: Any) -> Any:
        return lambda request: get_response(request) if request.body else None

    asked = site(lambda request: HttpResponse(), MIDDLEWARE=chain(noting))
    assert asked(body=b"123", fields=[("Content-Length", "5")]).status == 400
    assert states(ledger) == []


def test_a_body_can_be_read_after_the_answer(
    site: DjangoSite, chain: Callable[[Any], list[str]]
) -> None:
    """By a middleware around this one, whether the view has read it or not."""
    seen: list[bytes] = []

    def noting(get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            response = get_response(request)
            seen.append(request.body)
            return response

        return middleware

    asked = site(lambda request: HttpResponse(), MIDDLEWARE=chain(noting))
    assert [asked(body=b"123").status, seen] == [200, [b"123"]]


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse")
def test_a_stream_is_not_kept(site: DjangoSite, ledger: Ledger) -> None:
    """It passes as it comes, and its request is done when it has."""

    def view(request: Any) -> Any:
        return StreamingHttpResponse(pieces())

    def pieces() -> Iterator[bytes]:
        yield b"a"
        assert states(ledger) == [State.PROCESSING]
        yield b"b"

    asked = site(view)
    assert asked().body == b"ab"
    assert [asked().status, states(ledger)] == [409, [State.COMPLETED]]


def plain(*pieces: bytes, error: Exception | None = None) -> Iterator[bytes]:
    """A stream that ends, or breaks off."""
    yield from pieces
    if error:
        raise error


async def awaited(*pieces: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    """As `plain`, for asyncio; under WSGI Django reads it first."""
    for piece in plain(*pieces, error=error):
        yield piece


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse")
@pytest.mark.parametrize("pieces", [plain, awaited])
def test_a_stream_passes_or_breaks_off(
    site: DjangoSite, ledger: Ledger, pieces: Callable[..., Any]
) -> None:
    """Where it breaks off the server sees the error: the client is not told that it is whole."""
    assert site(lambda _: StreamingHttpResponse(pieces(b"a", b"b")))('"whole"').body == b"ab"
    asked = site(
        lambda _: StreamingHttpResponse(pieces(b"a", error=ValueError("broken"))),
        DEBUG_PROPAGATE_EXCEPTIONS=True,
    )
    with pytest.raises(ValueError, match="broken"):
        asked('"broken"')
    assert sorted(states(ledger)) == [State.FAILED, State.COMPLETED]


def test_django_inside_an_asgi_middleware(ledger: Ledger) -> None:
    """IdempotencyKey around Django's own application does what the middleware in it does."""
    calls = []

    def view(request: Any) -> Any:
        calls.append(request.body)
        return HttpResponse(b"done", status=202)

    with django_settings(view, MIDDLEWARE=[]):
        asked = asgi_client(IdempotencyKey(ASGIHandler(), ledger, consumer="api"))
        replies = [asked(body=b"1"), asked(body=b"1")]
    assert [(reply.status, reply.body, reply.is_replayed) for reply in replies] == [
        (202, b"done", False),
        (202, b"done", True),
    ]
    assert calls == [b"1"]


def test_the_loop_is_not_held(ledger: Ledger) -> None:
    """Under ASGI too, a function of the user's may ask Django's database, which refuses to be asked
    in the event loop; so the body is not read there.
    """
    options = {"ledger": ledger, "consumer": "api", "scope": async_unsafe(lambda _: "anna")}
    asked = async_client(lambda _: HttpResponse(b"done"), options)
    assert [asked().status, asked().is_replayed] == [200, True]


@pytest.mark.parametrize(
    ("leaves_in", "is_streamed", "status"),
    [("view", False, 200), ("view", True, 409), ("stream", True, 409)],
)
def test_a_client_that_goes_away_does_not_stop_a_view(
    ledger: Ledger, leaves_in: str, is_streamed: bool, status: int
) -> None:
    """Under ASGI Django stops a request whose client has gone; here it is done all the same, and
    does not run again where its stream was not read, or not to its end.
    """
    at: dict[str, Any] = {}
    calls = []

    async def view(request: Any) -> Any:
        calls.append(1)
        if leaves_in == "view":
            at["begun"].set()
            await at["gone"].wait()
        return StreamingHttpResponse(pieces()) if is_streamed else HttpResponse(b"done")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        at["begun"].set()
        await at["gone"].wait()

    oncely = {"ledger": ledger, "consumer": "api"}

    async def asked() -> None:
        at.update(begun=asyncio.Event(), gone=asyncio.Event())
        events = [{"type": "http.request", "body": b"{}"}]

        async def receive() -> Any:
            if events:
                return events.pop()
            await at["begun"].wait()
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            assert leaves_in == "stream", "nobody is there"

        scope = asgi_scope("POST", "/orders", "", [("Idempotency-Key", '"k"')])
        await handler(scope, receive, send)
        at["gone"].set()
        await wait_until_async(lambda: states(ledger) == [State.COMPLETED])

    with django_settings(view, ONCELY=oncely):
        handler: Any = ASGIHandler()
        asyncio.run(asked())
    assert [async_client(view, oncely)().status, calls] == [status, [1]]
