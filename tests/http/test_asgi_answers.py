"""What ASGI, WSGI and Django can do beside one answer in one piece."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from typing import Any

import flask
import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from tests.http.drivers import asgi_client, wsgi_client
from tests.integration.callers import Place, insertion

from oncely.core.record import Key, State
from oncely.http import IdempotencyKey, WsgiIdempotencyKey
from oncely.ledger import Ledger, open_ledger

KEY = Key("api", "POST /orders  k")


@pytest.fixture
def ledger() -> Ledger:
    return open_ledger("memory://")


def serving(endpoint: Any) -> Starlette:
    """An application of one endpoint."""
    return Starlette(routes=[Route("/orders", endpoint, methods=["POST"])])


def test_a_stream_passes_through(ledger: Ledger) -> None:
    """It comes to the client piece by piece, and runs once: a repetition is told why it is not
    given again.
    """
    begun: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        begun.append(1)
        for piece in (b"a", b"b", b"c"):
            yield piece

    async def pay(_: Request) -> Response:
        return StreamingResponse(pieces(), media_type="text/event-stream")

    post = asgi_client(IdempotencyKey(serving(pay), ledger, consumer="api"))
    assert post().body == b"abc"
    answer = post()
    assert (answer.status, answer.json()["code"]) == (409, "idempotency_answer_not_kept")
    assert "streamed" in answer.json()["detail"]
    assert len(begun) == 1


def test_a_slow_answer_passes_through(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no length and does not end soon goes to the client as it comes."""
    monkeypatch.setattr("oncely.http.asgi.HELD_S", 0.01)

    async def both() -> list[Any]:
        sent: list[Any] = []
        has_come = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            yield b"a"
            # Ends when the client has what came before.
            await has_come.wait()
            yield b"b"

        async def pay(_: Request) -> Response:
            return StreamingResponse(pieces())

        async def receive() -> Any:
            return {"type": "http.request", "body": b""}

        async def send(event: Any) -> None:
            sent.append(event)
            if event.get("body") == b"a":
                has_come.set()

        keyed = IdempotencyKey(serving(pay), ledger, consumer="api")
        headers = [(b"idempotency-key", b'"k"')]
        scope = {"type": "http", "method": "POST", "path": "/orders", "headers": headers}
        await keyed({**scope, "query_string": b""}, receive, send)
        return sent

    sent = asyncio.run(both())
    assert b"".join(event.get("body", b"") for event in sent) == b"ab"
    record = ledger.find(KEY)
    assert record is not None
    assert record.state is State.COMPLETED
    assert "not_kept" in record.result


def test_a_short_stream_is_kept(ledger: Ledger) -> None:
    """What ends at once may have been taken apart by a middleware, and is kept as a whole."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a", b"b"):
            yield piece

    async def pay(_: Request) -> Response:
        return StreamingResponse(pieces())

    post = asgi_client(IdempotencyKey(serving(pay), ledger, consumer="api"))
    assert post().body == post().body == b"ab"


def test_a_stream_that_fails(ledger: Ledger) -> None:
    """A stream that breaks off has failed, and runs again."""
    begun: list[int] = []

    async def pieces() -> AsyncIterator[bytes]:
        begun.append(1)
        yield b"a"
        if len(begun) == 1:
            raise ValueError("boom")
        yield b"b"

    async def pay(_: Request) -> Response:
        return StreamingResponse(pieces())

    post = asgi_client(IdempotencyKey(serving(pay), ledger, consumer="api"))
    with pytest.raises(ValueError, match="boom"):
        post()
    record = ledger.find(KEY)
    assert record is not None
    assert record.state is State.FAILED
    assert post().body == b"ab"


@pytest.mark.parametrize("is_outside", [True, False])
def test_beside_other_middleware(ledger: Ledger, is_outside: bool) -> None:
    """What compresses answers, or takes them apart, may stand on either side."""

    async def pay(_: Request) -> Response:
        return JSONResponse({"paid": "x" * 2_000}, 201)

    async def passing(request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        return answer

    app: Any = serving(pay)
    if is_outside:
        app = IdempotencyKey(app, ledger, consumer="api")
    app = GZipMiddleware(BaseHTTPMiddleware(app, passing), minimum_size=100)
    if not is_outside:
        app = IdempotencyKey(app, ledger, consumer="api")
    post = asgi_client(app)
    first, second = (post(fields=[("Accept-Encoding", "gzip")]) for _ in range(2))
    assert gzip.decompress(first.body) == b'{"paid":"' + b"x" * 2_000 + b'"}'
    assert second.body == first.body
    assert second.is_replayed
    assert second.value_of("content-encoding") == "gzip"


def test_a_mounted_application(ledger: Ledger) -> None:
    """The path counts from the root of the server, wherever the middleware stands."""

    async def pay(_: Request) -> Response:
        return JSONResponse({})

    inner = IdempotencyKey(serving(pay), ledger, consumer="api")
    post = asgi_client(Starlette(routes=[Mount("/v1", inner)]))
    assert post(path="/v1/orders").status == 200
    assert ledger.find(Key("api", "POST /v1/orders  k")) is not None


def test_a_client_that_goes_away(ledger: Ledger) -> None:
    """Its request runs to its end, and the answer is there when it asks again."""

    async def both() -> httpx.Response:
        began, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def pay(_: Request) -> Response:
            began.set()
            await may_end.wait()
            ended.set()
            return JSONResponse({"paid": 1}, 201)

        app = IdempotencyKey(serving(pay), ledger, consumer="api")
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {"Idempotency-Key": '"k"'}
            first = asyncio.create_task(client.post("/orders", headers=headers))
            await began.wait()
            first.cancel()
            await asyncio.wait([first])
            assert first.cancelled()
            may_end.set()
            await ended.wait()
            while True:
                answer = await client.post("/orders", headers=headers)
                if "retry-after" not in answer.headers:
                    return answer
                await asyncio.sleep(0)

    answer = asyncio.run(both())
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")


def test_an_application_that_says_nothing(ledger: Ledger) -> None:
    """One that returns without an answer has failed."""

    async def silent(_: Any, __: Any, ___: Any) -> None:
        pass

    post = asgi_client(IdempotencyKey(silent, ledger, consumer="api"))
    with pytest.raises(RuntimeError, match="before its response was complete"):
        post()
    record = ledger.find(KEY)
    assert record is not None
    assert record.state is State.FAILED


def test_what_is_not_http(ledger: Ledger) -> None:
    """Lifespans and WebSockets pass by."""
    seen: list[str] = []

    async def app(scope: Any, _: Any, __: Any) -> None:
        seen.append(scope["type"])

    keyed = IdempotencyKey(app, ledger, consumer="api")
    for type_ in ("lifespan", "websocket"):
        asyncio.run(keyed({"type": type_}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


# ---- WSGI ----------------------------------------------------------------------------------------


def test_flask_has_the_request_in_g(place: Place) -> None:
    """`g.oncely` gives the transaction, in which everything is stored."""
    app = flask.Flask("shop")

    @app.post("/orders")
    def pay() -> Any:
        state = flask.g.oncely
        with Session(place.engine) as session, session.begin(), state.transaction(session):
            session.execute(text(insertion(state.key)))
            return state.respond(flask.jsonify({"paid": 1}))

    app.wsgi_app = WsgiIdempotencyKey(app.wsgi_app, place.ledger, consumer="api")  # type: ignore[method-assign]
    post = wsgi_client(app)
    first, second = post(), post()
    assert first.json() == second.json() == {"paid": 1}
    assert second.is_replayed
    assert place.rows() == ["k"]


@pytest.mark.parametrize("are_read", [0, 1, 3])
def test_a_stream_of_wsgi(ledger: Ledger, are_read: int) -> None:
    """It passes through; where the client goes away, it runs to its end all the same."""
    made: list[bytes] = []

    def pieces() -> Iterator[bytes]:
        for piece in (b"a", b"b", b"c"):
            made.append(piece)
            yield piece

    def app(_: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return pieces()

    keyed = WsgiIdempotencyKey(app, ledger, consumer="api")
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders",
        "HTTP_IDEMPOTENCY_KEY": '"k"',
        "wsgi.input": None,
    }
    answer: Any = keyed(environ, lambda *_: lambda _: None)
    assert [next(answer) for _ in range(are_read)] == [b"a", b"b", b"c"][:are_read]
    answer.close()
    assert made == [b"a", b"b", b"c"]
    record = ledger.find(KEY)
    assert record is not None
    assert record.state is State.COMPLETED
