"""Hostile clients, and clumsy applications, around WsgiIdempotencyKey."""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.http.drivers import (
    CountedPiece,
    Reply,
    Shop,
    Site,
    drive_by,
    peak_of,
    states,
    wsgi_client,
    wsgi_environ,
    wsgi_reply,
)

from oncely.core.errors import MessageError
from oncely.core.message import current
from oncely.core.record import State
from oncely.http import WsgiIdempotencyKey
from oncely.http.answers import HELD_S
from oncely.ledger.ledger import Ledger

App = Callable[[Any, Any], Iterable[bytes]]


@pytest.fixture
def site(ledger: Ledger) -> Callable[..., Site]:
    """Makes a site of a WSGI application."""
    return lambda app, **options: wsgi_client(
        WsgiIdempotencyKey(app, ledger, consumer="api", **options)
    )


def echo(environ: Any, start_response: Any) -> Iterable[bytes]:
    """Answers the request's body."""
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


# ---- Requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wsgi", "django"])
@pytest.mark.parametrize("length", ["abc", "-5", "+5", "1_0", "٣", "1e3", " 5", "9" * 5000, "12"])
def test_a_length_that_lies_is_the_clients_error(
    ledger: Ledger, shop: Shop, kind: str, length: str
) -> None:
    """What is not a length, and a body that breaks off, are refused as servers see to it that do
    not let applications do it; nothing is recorded.
    """
    asked = drive_by(kind, ledger, shop)()
    reply = asked(body=b"12345678901", fields=[("Content-Length", length)])
    assert [reply.status, shop.calls, states(ledger)] == [400, 0, []]


def test_a_body_in_chunks_counts_whole(ledger: Ledger) -> None:
    """The server takes the chunks apart, and says so: there is no length."""
    app = WsgiIdempotencyKey(echo, ledger, consumer="api")

    def ask(body: bytes) -> Reply:
        environ = wsgi_environ("POST", "/", "", [("Idempotency-Key", '"k"')], body)
        del environ["CONTENT_LENGTH"]
        return wsgi_reply(app, {**environ, "wsgi.input_terminated": True})

    body = b"x" * 200_000
    assert [ask(body).body, ask(body).is_replayed, ask(body + b"y").status] == [body, True, 422]


def test_more_than_the_length_is_not_read(site: Callable[..., Site]) -> None:
    """What follows is the connection's next request."""
    assert site(echo)(body=b"12345", fields=[("Content-Length", "3")]).body == b"123"


def test_a_large_body_is_not_kept_in_memory(ledger: Ledger) -> None:
    """20 MB of a request pass through a file."""
    seen = []

    def count(environ: Any, start_response: Any) -> Iterable[bytes]:
        while piece := environ["wsgi.input"].read(65_536):
            seen.append(len(piece))
        start_response("201 Created", [])
        return [b"done"]

    class Upload(io.RawIOBase):
        left = 20_000_000

        def read(self, size: int = -1) -> bytes:
            piece = b"x" * min(size, self.left)
            self.left -= len(piece)
            return piece

    app = WsgiIdempotencyKey(count, ledger, consumer="api", max_request_body="32MiB")
    fields = [("Idempotency-Key", '"k"'), ("Content-Length", "20000000")]
    environ = wsgi_environ("POST", "/", "", fields, b"")
    reply, peak = peak_of(lambda: wsgi_reply(app, {**environ, "wsgi.input": Upload()}))
    assert [reply.status, sum(seen)] == [201, 20_000_000]
    assert peak < 5_000_000


# ---- Applications ------------------------------------------------------------------------------


def no_start(environ: Any, start_response: Any) -> Iterable[bytes]:
    return [b"answer"]


def nothing(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [])


def broken(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [("Content-Length", "6")])
    yield b"ans"
    raise ValueError("broken")


def broken_stream(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [])
    yield b"some"
    raise ValueError("broken")


def late(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    yield b"some"
    try:
        raise ValueError("late")
    except ValueError:
        # PEP 3333: an answer that has begun stays what it is, and this raises what it is given.
        start_response("500 Internal Server Error", [], sys.exc_info())
    yield b"sorry"


def exiting(environ: Any, start_response: Any) -> Iterable[bytes]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("app", "error"),
    [
        *((no_start, RuntimeError), (nothing, TypeError), (broken, ValueError)),
        *((broken_stream, ValueError), (late, ValueError), (exiting, SystemExit)),
    ],
)
def test_what_is_not_an_answer_is_a_failure(
    site: Callable[..., Site], ledger: Ledger, app: App, error: type[BaseException]
) -> None:
    """The server sees the error; the client is not told that the answer is whole."""
    with pytest.raises(error):
        site(app)()
    assert states(ledger) == [State.FAILED]


def test_the_last_start_counts(site: Callable[..., Site]) -> None:
    """As long as nothing was sent, an error's answer takes the other one's place."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [])
        try:
            raise ValueError("late")
        except ValueError:
            start_response("404 Not Found", [], sys.exc_info())
        return [b"sorry"]

    reply = site(app)()
    assert [reply.status, reply.body] == [404, b"sorry"]


def test_what_is_written_is_not_lost(site: Callable[..., Site]) -> None:
    """By the callable that `start_response` returns, which PEP 3333 keeps for old applications."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        write = start_response("200 OK", [])
        write(b"one ")
        yield b"two "
        write(b"three ")
        yield b"four"

    asked = site(app)
    assert [asked().body, asked().body] == [b"one two three four"] * 2


@pytest.mark.parametrize("are_read", [0, 1])
def test_a_client_that_goes_away_does_not_stop_an_application(
    ledger: Ledger, are_read: int
) -> None:
    """What it streams is read to its end by nobody, and the request is done."""
    sent = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        for number in range(5):
            sent.append(number)
            yield b"."

    environ = wsgi_environ("POST", "/", "", [("Idempotency-Key", '"k"')], b"{}")
    chunks: Any = WsgiIdempotencyKey(app, ledger, consumer="api")(environ, lambda *_: print)
    assert [next(iter(chunks)) for _ in range(are_read)] == [b"."] * are_read
    chunks.close()
    assert [sent, states(ledger)] == [[0, 1, 2, 3, 4], [State.COMPLETED]]


def test_an_answer_in_many_pieces_costs_what_its_length_costs(site: Callable[..., Site]) -> None:
    """What is held back is not counted again with each piece."""
    pieces, piece = 2_000, CountedPiece(b"x")

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", str(pieces))])
        return (piece for _ in range(pieces))

    asked = site(app)
    assert [len(asked().body), asked().is_replayed] == [pieces, True]
    assert piece.counts < 5 * pieces


def test_a_generator_is_closed_once(site: Callable[..., Site]) -> None:
    """What an application has opened for an answer is closed, whether that is held back or not."""
    closed = []

    class Chunks:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"a", b"b"])

        def close(self) -> None:
            closed.append("closed")

    for fields in ([("Content-Length", "2")], []):

        def app(environ: Any, start_response: Any, fields: Any = fields) -> Iterable[bytes]:
            start_response("200 OK", fields)
            return Chunks()

        assert site(app)(f'"{len(fields)}"').body == b"ab"
    assert closed == ["closed", "closed"]


@pytest.mark.parametrize("error", [AssertionError("hop-by-hop"), SystemExit(3)])
def test_a_server_that_refuses_a_stream_ends_its_request(
    ledger: Ledger, error: BaseException
) -> None:
    """Nobody reads or closes it then: it has failed, and nothing of it stays open."""
    closed = []

    class Chunks:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"a"])

        def close(self) -> None:
            closed.append("chunks")

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        inputs.append(environ["wsgi.input"])
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        return Chunks()

    def refuse(*_: Any) -> Any:
        raise error

    inputs: list[Any] = []
    environ = wsgi_environ("POST", "/", "", [("Idempotency-Key", '"k"')], b"{}")
    with pytest.raises(type(error)):
        WsgiIdempotencyKey(app, ledger, consumer="api")(environ, refuse)
    assert [states(ledger), closed, inputs[0].closed] == [[State.FAILED], ["chunks"], True]
    with pytest.raises(MessageError):
        current()


def test_a_slow_application_is_not_a_stream(
    site: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is held back a second from its first chunk on: what came before does not count."""

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        take_s(5)
        start_response("200 OK", [])
        yield b"one "
        take_s(late_s)
        yield b"two"

    now = 0.0

    def take_s(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("oncely.http.wsgi.clock", SimpleNamespace(monotonic=lambda: now))
    for late_s, is_replayed in ((HELD_S, True), (HELD_S + 0.1, False)):
        key = f'"{late_s}"'
        assert [site(app)(key).body, site(app)(key).is_replayed] == [b"one two", is_replayed]
