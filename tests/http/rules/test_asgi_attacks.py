"""Hostile clients, clumsy applications and other middleware around IdempotencyKey."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from tests.conditions import wait_until_async
from tests.http.drivers import (
    CountedPiece,
    Reply,
    asgi_client,
    asgi_reply,
    asgi_scope,
    peak_of,
    read_all,
    reply_of,
    states,
)

from oncely.core.record import Key, State
from oncely.http import IdempotencyKey
from oncely.ledger.ledger import Ledger

Guard = Callable[..., Any]


@pytest.fixture
def guard(ledger: Ledger) -> Guard:
    """Puts an application behind the middleware."""
    return lambda app, **options: IdempotencyKey(app, ledger, consumer="api", **options)


def keyed() -> dict[str, Any]:
    """The scope of a request with a key."""
    return asgi_scope("POST", "/orders", "", [("Idempotency-Key", '"k"')])


def ask(app: Any, *body: bytes, sent: list[Any] | None = None) -> Reply:
    """What a request with a key is answered."""
    return asyncio.run(asgi_reply(app, keyed(), *body, sent=sent))


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(piece: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": piece, "more_body": more}


def sending(*events: dict[str, Any]) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """An application that sends these."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for event in events:
            await send(event)

    return app


done = sending(start(201), body(b"done"))


# ---- Requests ----------------------------------------------------------------------------------


def test_a_body_in_chunks_counts_whole(guard: Guard) -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        whole = await read_all(receive)
        await send(start())
        await send(body(whole))

    app = guard(echo)
    assert ask(app, b'{"a":', b"", b" 1}").body == b'{"a": 1}'
    assert ask(app, b"{", b'"a": 1', b"}").is_replayed
    assert ask(app, b'{"a":', b" 2}").status == 422


def test_a_client_that_goes_amid_its_request_has_not_asked(guard: Guard, ledger: Ledger) -> None:
    """Half a body is not handled, and the key is free; whoever still listens is told."""
    events = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event)

    asyncio.run(guard(done)(keyed(), receive, send))
    assert [sent[0]["status"], states(ledger)] == [400, []]


def test_a_large_body_is_not_kept_in_memory(guard: Guard) -> None:
    """20 MB of a request pass through a file, and come to the application in pieces."""
    sizes = []

    async def count(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            event = await receive()
            sizes.append(len(event["body"]))
            more = event["more_body"]
        await done(scope, receive, send)

    app = guard(count, max_request_body="32MiB")
    reply, peak = peak_of(lambda: ask(app, *[b"x" * 1_000_000] * 20))
    assert [reply.status, sum(sizes)] == [201, 20_000_000]
    assert max(sizes) < 1_000_000
    assert peak < 8_000_000


# ---- Applications ------------------------------------------------------------------------------


class Oops(BaseException):
    """An error that is not an Exception."""


@pytest.mark.parametrize(
    "error", [Oops(), asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt()]
)
def test_a_handler_that_raises_has_failed(
    guard: Guard, ledger: Ledger, error: BaseException
) -> None:
    """Whatever it raises, and also what ends the loop, is the server's to see."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        ask(guard(app))
    assert states(ledger) == [State.FAILED]


@pytest.mark.parametrize(
    "events",
    [
        [],
        [start()],
        [start(200, (b"content-length", b"9")), body(b"some", more=True)],
        [body(b"before its start")],
        [start(200), start(404), body(b"?")],
    ],
)
def test_what_is_not_an_answer_is_a_failure(
    guard: Guard, ledger: Ledger, events: Sequence[dict[str, Any]]
) -> None:
    """The client gets none of it: the server sees an error, and answers 500."""
    with pytest.raises(RuntimeError, match="the application has"):
        ask(guard(sending(*events)))
    assert states(ledger) == [State.FAILED]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_is_sent_after_the_end_is_an_error(
    guard: Guard, ledger: Ledger, is_streamed: bool
) -> None:
    """Of the application, as servers have it; the answer was whole before, and stays."""
    pieces = [body(b"a", more=True), body(b"b")] if is_streamed else [body(b"ab")]
    sent: list[Any] = []
    with pytest.raises(RuntimeError, match="the application has sent more after the end"):
        ask(guard(sending(start(), *pieces, body(b"c"))), sent=sent)
    assert [reply_of(sent).body, states(ledger)] == [b"ab", [State.COMPLETED]]


def test_a_stream_that_breaks_off_is_a_failure(guard: Guard, ledger: Ledger) -> None:
    """The server sees the error, and breaks the answer off: the client is not told it is whole."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await sending(start(), body(b"some", more=True))(scope, receive, send)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        ask(guard(app))
    assert states(ledger) == [State.FAILED]


def test_a_stream_passes_as_it_comes(guard: Guard, ledger: Ledger) -> None:
    """Each piece is with the client before the next is made; what is not kept is told of."""
    sent: list[Any] = []
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(200, (b"content-type", b"text/event-stream")))
        for number in range(3):
            await send(body(b"%d" % number, more=True))
            seen.append(sent[-1]["body"])
        await send(body(b""))

    guarded = guard(app)
    ask(guarded, sent=sent)
    assert seen == [b"0", b"1", b"2"]
    again = ask(guarded)
    assert [again.status, again.json()["code"]] == [409, "idempotency_answer_not_kept"]
    assert "streamed" in again.json()["detail"]


def test_a_slow_answer_passes_through(
    guard: Guard, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no length and does not end soon goes to the client as it comes, and is not kept."""
    monkeypatch.setattr("oncely.http.asgi.HELD_S", 0.01)
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(body(b"a", more=True))
        await wait_until_async(lambda: any(event.get("body") == b"a" for event in sent))
        await send(body(b"b"))

    assert ask(guard(app), sent=sent).body == b"ab"
    [record] = ledger.scan()
    assert record.state is State.COMPLETED
    assert "not_kept" in record.result


def test_an_answer_in_many_pieces_costs_what_its_length_costs(guard: Guard) -> None:
    """What is held back is not counted again with each piece."""
    pieces, piece = 2_000, CountedPiece(b"x")
    length = (b"content-length", b"%d" % pieces)
    app = guard(sending(start(200, length), *[body(piece, more=True)] * (pieces - 1), body(piece)))
    assert [len(ask(app).body), ask(app).is_replayed] == [pieces, True]
    assert piece.counts < 5 * pieces


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_does_not_stop_an_application(
    guard: Guard, ledger: Ledger, is_streamed: bool
) -> None:
    """Some servers cancel, others let `send` raise: the request is done all the same."""
    held: dict[str, asyncio.Event] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        type_ = b"text/event-stream" if is_streamed else b"text/plain"
        await send(start(200, (b"content-type", type_)))
        if is_streamed:
            await send(body(b"some", more=True))
        held["begun"].set()
        await held["gone"].wait()
        await send(body(b"rest"))

    async def asked() -> None:
        held.update(begun=asyncio.Event(), gone=asyncio.Event())

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(event: Any) -> None:
            raise OSError("connection lost")

        request = asyncio.ensure_future(guarded(keyed(), receive, send))
        await held["begun"].wait()
        request.cancel()
        await asyncio.wait({request})
        held["gone"].set()
        await wait_until_async(lambda: states(ledger) == [State.COMPLETED])

    guarded = guard(app)
    asyncio.run(asked())
    assert ask(guarded).status == (409 if is_streamed else 200)


def test_a_server_that_stops_leaves_no_claim(guard: Guard, ledger: Ledger) -> None:
    """What it has cancelled has failed, and may be repeated at once."""
    begun = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def stopped() -> None:
        request = asyncio.ensure_future(asgi_reply(guard(app), keyed()))
        await begun.wait()
        request.cancel()
        await asyncio.wait({request})

    asyncio.run(stopped())
    assert states(ledger) == [State.FAILED]


def test_an_application_is_not_told_that_its_client_has_gone(guard: Guard) -> None:
    """Before its answer is whole: frameworks would stop it. After that it may wait for it."""
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_all(receive)
        waiting = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        told.append(waiting.done())
        await done(scope, receive, send)
        told.append((await waiting)["type"])

    assert ask(guard(app)).status == 201
    assert told == [False, "http.disconnect"]


def test_work_in_the_background_follows_the_answer(guard: Guard, ledger: Ledger) -> None:
    """The request is done, and its answer sent, while the application goes on; its error there is
    the server's to see, and changes nothing.
    """
    seen: list[Any] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await done(scope, receive, send)
        await wait_until_async(lambda: sent)
        seen.append((states(ledger), reply_of(sent).body))
        raise ValueError("in the background")

    guarded = guard(app)
    with pytest.raises(ValueError, match="in the background"):
        ask(guarded, sent=sent)
    assert seen == [([State.COMPLETED], b"done")]
    assert ask(guarded).is_replayed


# ---- Other middleware --------------------------------------------------------------------------


def serving(endpoint: Any) -> Starlette:
    """An application of one endpoint."""
    return Starlette(routes=[Route("/orders", endpoint, methods=["POST"])])


def test_a_short_stream_is_kept(guard: Guard) -> None:
    """What ends at once may have been taken apart by a middleware, and is kept as a whole."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"a", b"b"):
            yield piece

    async def pay(_: Request) -> Response:
        return StreamingResponse(pieces())

    app = guard(serving(pay))
    assert [ask(app).body, ask(app).body, ask(app).is_replayed] == [b"ab", b"ab", True]


@pytest.mark.parametrize("is_outside", [True, False])
def test_beside_other_middleware(guard: Guard, is_outside: bool) -> None:
    """What compresses answers, or takes them apart, may stand on either side; inside, it is not
    told that it could compress.
    """

    async def pay(_: Request) -> Response:
        return JSONResponse({"paid": "x" * 2_000}, 201)

    async def passing(request: Request, call_next: Any) -> Response:
        answer: Response = await call_next(request)
        return answer

    app: Any = serving(pay)
    if is_outside:
        app = guard(app)
    app = GZipMiddleware(BaseHTTPMiddleware(app, passing), minimum_size=100)
    if not is_outside:
        app = guard(app)
    post = asgi_client(app)
    first, second = (post(fields=[("Accept-Encoding", "gzip")]) for _ in range(2))
    assert second.body == first.body
    assert second.is_replayed
    assert second.value_of("content-encoding") == ("gzip" if is_outside else None)
    body = gzip.decompress(first.body) if is_outside else first.body
    assert body == b'{"paid":"' + b"x" * 2_000 + b'"}'


def test_a_mounted_application(guard: Guard, ledger: Ledger) -> None:
    """The path counts from the root of the server, wherever the middleware stands."""

    async def pay(_: Request) -> Response:
        return JSONResponse({})

    post = asgi_client(Starlette(routes=[Mount("/v1", guard(serving(pay)))]))
    assert post(path="/v1/orders").status == 200
    assert ledger.find(Key("api", "POST /v1/orders  k")) is not None


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_what_is_not_http_passes_untouched(guard: Guard, ledger: Ledger, kind: str) -> None:
    seen: list[Any] = []

    async def app(*arguments: Any) -> None:
        seen.extend(arguments)

    scope: dict[str, Any] = {"type": kind, "headers": [(b"idempotency-key", b'"k"')]}
    marks: list[Any] = [object(), object()]
    asyncio.run(guard(app)(scope, *marks))
    assert [seen[0] is scope, seen[1:], states(ledger)] == [True, marks, []]
