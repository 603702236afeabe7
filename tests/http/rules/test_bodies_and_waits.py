"""Bodies that are cut off or too large, and a ledger that does not answer, by each middleware."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from tests.conditions import wait_until
from tests.http.drivers import (
    DRIVES,
    Drive,
    Fields,
    Reply,
    Shop,
    asgi_reply,
    asgi_scope,
    django_settings,
    drive_by,
    read_all,
    wsgi_environ,
    wsgi_reply,
)
from tests.meddling import MeddlingStore

from oncely.core.json_equality import equal_json
from oncely.core.policy import Policy
from oncely.core.record import State
from oncely.http import IdempotencyKey, WsgiIdempotencyKey, http_request, keyed_requests
from oncely.ledger.ledger import Ledger
from oncely.stores.memory_store import MemoryStore

KEYED: Fields = [("Idempotency-Key", "k")]


async def asgi_app(_: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    body = await read_all(receive)
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"%d" % len(body)})


def wsgi_app(environ: Any, start_response: Any) -> Any:
    """The same."""
    body = environ["wsgi.input"].read()
    start_response("201 Created", [])
    return [b"%d" % len(body)]


def django_view(request: Any) -> Any:
    """The same."""
    return HttpResponse(b"%d" % len(request.body), status=201)


Ask = Callable[..., Reply]


@pytest.fixture(params=["asgi", "wsgi, terminated", "wsgi", "django"])
def ask(request: pytest.FixtureRequest, ledger: Ledger) -> Ask:
    """Brings a body of which the server has read less or more than the request says: (body, length
    that is declared) -> reply.
    """
    options: Any = {"consumer": "api", "max_request_body": "100KiB"}

    def ask(body: bytes, declared: int | None) -> Reply:
        fields = [*KEYED, *([("Content-Length", str(declared))] if declared is not None else [])]
        if request.param == "asgi":
            app = IdempotencyKey(asgi_app, ledger, **options)
            pieces = [body[at : at + 40_000] for at in range(0, len(body), 40_000)]
            return asyncio.run(asgi_reply(app, asgi_scope("POST", "/", "", fields), *pieces))
        environ = wsgi_environ("POST", "/", "", fields, body)
        environ["wsgi.input_terminated"] = request.param == "wsgi, terminated"
        if declared is None:
            del environ["CONTENT_LENGTH"]
        if request.param == "django":
            with django_settings(django_view, ONCELY={"ledger": ledger, **options}):
                return wsgi_reply(WSGIHandler(), environ)
        return wsgi_reply(WsgiIdempotencyKey(wsgi_app, ledger, **options), environ)

    return ask


def test_a_body_that_was_cut_off_leaves_nothing(ask: Ask, ledger: Ledger) -> None:
    """Also where the server hands it over as whole: the correct repetition runs."""
    cut = ask(b"x" * 50_000, 60_000)
    assert [cut.status, cut.json()["code"]] == [400, "idempotency_incomplete"]
    assert [*ledger.scan()] == []
    whole = ask(b"x" * 60_000, 60_000)
    assert [whole.status, whole.body, whole.is_replayed] == [201, b"60000", False]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(ask: Ask, ledger: Ledger, declared: bool) -> None:
    """By what the request says, before it is read; and by what comes."""
    body = b"x" * (100 * 1_024 + 1)
    reply = ask(body, len(body) if declared else None)
    if not declared and reply.status == 201:
        assert reply.body == b"0"  # Without a length, WSGI has no body.
        return
    assert [reply.status, reply.json()["code"]] == [413, "idempotency_too_large"]
    assert [*ledger.scan()] == []
    assert ask(body[:-1], len(body) - 1).status == 201


def test_nothing_is_read_that_is_too_large(ledger: Ledger) -> None:
    """The client is not waited for."""

    async def no_body() -> Any:
        raise AssertionError("the body was read")

    async def send(event: Any) -> None:
        sent.append(event)

    sent: list[Any] = []
    scope = asgi_scope("POST", "/", "", [*KEYED, ("Content-Length", "200000000")])
    asyncio.run(IdempotencyKey(asgi_app, ledger, consumer="api")(scope, no_body, send))
    assert sent[0]["status"] == 413


def test_the_loop_reads_no_large_json(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread does; what is small, the loop reads itself."""
    threads: list[bool] = []

    def noted(body: bytes) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return equal_json(body)

    monkeypatch.setattr(http_request, "equal_json", noted)
    app = IdempotencyKey(asgi_app, ledger, consumer="api")
    for size in (10, 100_000):
        fields = [("Idempotency-Key", str(size))]
        asyncio.run(asgi_reply(app, asgi_scope("POST", "/", "", fields), b'"' + b"x" * size + b'"'))
    assert threads == [True, False]


# ---- A ledger that does not answer -------------------------------------------------------------


class Frozen:
    """A ledger in memory whose store answers when it is told to."""

    def __init__(self) -> None:
        self.store = MeddlingStore(MemoryStore())
        self.ledger = Ledger(self.store)
        self.goes_on = threading.Event()

    def freeze(self) -> None:
        """From now on writes wait."""
        self.store.meddle = lambda: self.goes_on.wait(60)

    def go_on(self) -> None:
        """Those that wait go on, and no other waits."""
        self.store.meddle = lambda: None
        self.goes_on.set()

    @property
    def states(self) -> list[State]:
        return [record.state for record in self.ledger.scan()]


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    """Goes on at the end, whatever happens."""
    frozen = Frozen()
    with closing(frozen.ledger):
        yield frozen
        frozen.go_on()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that goes on after a request, as a server's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    for _ in range(3):  # What follows them is a task, too.
        wait_until(lambda: not asyncio.all_tasks(loop))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


@pytest.fixture(params=sorted(DRIVES))
def drive(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    frozen: Frozen,
    shop: Shop,
    monkeypatch: pytest.MonkeyPatch,
) -> Drive:
    """Makes a site with that ledger."""
    monkeypatch.setattr(
        asyncio, "run", lambda reply: asyncio.run_coroutine_threadsafe(reply, loop).result()
    )
    return drive_by(request.param, frozen.ledger, shop)


def test_a_new_request_does_not_wait(drive: Drive, frozen: Frozen, shop: Shop) -> None:
    """It is answered with 503. The claim that comes later is given back: a repetition runs."""
    site = drive(timeout="0.2s")
    frozen.freeze()
    reply = site()
    assert [reply.status, reply.json()["code"]] == [503, "idempotency_unavailable"]
    assert reply.value_of("Retry-After")
    frozen.go_on()
    wait_until(lambda: site().status == 201)
    assert shop.calls == 1
    assert frozen.states == [State.COMPLETED]


def test_more_requests_than_threads(
    frozen: Frozen, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that is only begun when its request was answered is given back, as one that is late:
    its key is not busy for ever.
    """
    monkeypatch.setattr(keyed_requests, "_THREADS", 1)
    site = drive_by("wsgi", frozen.ledger, shop)(timeout="0.2s")
    frozen.freeze()
    assert [site('"first"').status, site('"second"').status] == [503, 503]
    frozen.go_on()
    wait_until(lambda: site('"second"').status == 201)


def test_a_policy_may_let_it_run(drive: Drive, frozen: Frozen, shop: Shop) -> None:
    """Untracked, as without a ledger."""
    site = drive(timeout="0.2s", policy=Policy(on_outage="run"))
    frozen.freeze()
    assert [site().status, site().status, shop.calls] == [201, 201, 2]


def test_an_answer_does_not_wait(drive: Drive, frozen: Frozen, shop: Shop) -> None:
    """It was given: the client gets it, and its end is stored as soon as the store answers."""

    def freezing(asked: Any) -> Any:
        frozen.freeze()
        return shop(asked)

    site = drive(freezing, timeout="0.2s")
    assert site().status == 201
    assert frozen.states == [State.PROCESSING]
    frozen.go_on()
    wait_until(lambda: frozen.states == [State.COMPLETED])
    assert site().is_replayed


def test_a_lease_of_requests_is_short(ledger: Ledger) -> None:
    """What a killed server leaves waits half a minute; a policy's own lease, or another, counts. A
    ledger that does not answer is waited for five seconds.
    """
    all_options: Sequence[Any] = (
        *({}, {"policy": Policy(on_in_doubt="hold")}, {"policy": Policy(lease="2m")}),
        {"policy": Policy(lease="2m"), "lease": "7s", "timeout": "1s"},
    )
    made = [IdempotencyKey(asgi_app, ledger, consumer="api", **each) for each in all_options]
    assert [each._requests.lifecycle.lease_s for each in made] == [30, 30, 120, 7]
    assert [each._requests._timeout_s for each in made] == [5, 5, 5, 1]
