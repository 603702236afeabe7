"""A request's end, its rows, its answer and what it sends are stored in one transaction."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, nullcontext
from typing import Any

import fastapi
import flask
import httpx
import pytest
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.http.conftest import on_a_server_too
from tests.http.drivers import wsgi_client
from tests.integration.callers import Place, insertion
from tests.kills import killed_at

from oncely.core.errors import ConfigError, EndedError
from oncely.core.record import Key, State
from oncely.http import IdempotencyKey, WsgiIdempotencyKey
from oncely.outbox import Relay
from oncely.transports.open_transport import open_transport

KEY = Key("api", "POST /pay  k1")
Endpoint = Callable[[Request], Awaitable[Response]] | Callable[[Request], Response]

ASYNC_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "mysql": "mysql+asyncmy",
}


def application(place: Place, endpoint: Endpoint, **options: Any) -> IdempotencyKey:
    """An application of one endpoint."""
    app = Starlette(routes=[Route("/pay", endpoint, methods=["POST"])])
    return IdempotencyKey(app, place.ledger, consumer="api", **options)


async def posted(
    app: Any, times: int = 1, *, key: str | None = '"k1"', raises: bool = False
) -> list[httpx.Response]:
    """The answers to so many equal requests, one after another."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=raises)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {} if key is None else {"Idempotency-Key": key}
        return [
            await client.post("/pay", json={"amount": 1}, headers=headers) for _ in range(times)
        ]


def post(app: Any, times: int = 1, **how: Any) -> list[httpx.Response]:
    """The same for tests that are not async."""
    return asyncio.run(posted(app, times, **how))


@on_a_server_too
def test_all_is_stored_at_once(place: Place) -> None:
    """The rows, the end, the answer and what was sent are committed together; a repetition is given
    the answer.
    """

    def pay(request: Request) -> Response:
        state = request.state.oncely
        with Session(place.engine) as session, session.begin():
            with state.transaction(session) as inbox:
                session.execute(text(insertion("m")))
                inbox.send("mails", {"to": "anna"})
                answer: Response = state.respond(JSONResponse({"paid": 1}, 201, {"X-Own": "yes"}))
                return answer

    first, second = post(application(place, pay), 2)
    assert (first.status_code, first.json()) == (201, {"paid": 1})
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert (second.status_code, second.content) == (201, first.content)
    assert second.headers["x-own"] == "yes"
    assert place.rows() == ["m"]
    with closing(open_transport("memory://mails-of-requests")) as transport:
        transport.subscribe("mails", [])
        assert Relay(place.ledger, transport).send_waiting().sent == 1


def test_an_answer_that_is_known_later(place: Place) -> None:
    """What a handler answers after its transaction is kept, too, also where messages were sent and
    a relay was faster.
    """

    def pay(request: Request) -> Response:
        with Session(place.engine) as session, session.begin():
            with request.state.oncely.transaction(session) as inbox:
                session.execute(text(insertion("m")))
                inbox.send("mails", {"to": "anna"})
        with closing(open_transport("memory://later-mails")) as transport:
            transport.subscribe("mails", [])
            Relay(place.ledger, transport).send_waiting()
        assert place.find(KEY).state is State.COMPLETED
        return JSONResponse({"paid": 1}, 201)

    first, second = post(application(place, pay), 2)
    assert (second.status_code, second.content) == (201, first.content)
    assert second.headers["idempotency-replayed"] == "true"
    assert place.rows() == ["m"]


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
    ask = wsgi_client(app)
    first, second = ask(), ask()
    assert first.json() == second.json() == {"paid": 1}
    assert second.is_replayed
    assert place.rows() == ["k"]


@on_a_server_too
def test_with_an_async_session(place: Place) -> None:
    """The same with SQLAlchemy's asyncio."""
    url = make_url(place.url).set(drivername=ASYNC_DRIVERS[place.kind])

    async def both() -> list[httpx.Response]:
        engine = create_async_engine(url)

        async def pay(request: Request) -> Response:
            state = request.state.oncely
            async with AsyncSession(engine) as session, session.begin():
                async with state.transaction(session) as inbox:
                    await session.execute(text(insertion("m")))
                    await inbox.send("mails", {"to": "anna"})
                    answer: Response = state.respond(JSONResponse({"paid": 1}, 201))
                    return answer

        try:
            return await posted(application(place, pay), 2)
        finally:
            await engine.dispose()

    first, second = asyncio.run(both())
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.headers["idempotency-replayed"] == "true"
    assert place.rows() == ["m"]


@on_a_server_too
def test_a_rollback_is_a_failure(place: Place) -> None:
    """What is rolled back by an error leaves a failed request, which runs again."""
    runs: list[int] = []

    def pay(request: Request) -> Response:
        runs.append(1)
        with Session(place.engine) as session, session.begin():
            with request.state.oncely.transaction(session):
                session.execute(text(insertion("m")))
            if len(runs) == 1:
                raise RuntimeError("after the block, before the commit")
        return JSONResponse({"run": len(runs)})

    first, second, third = post(application(place, pay), 3)
    assert (first.status_code, second.json(), third.json()) == (500, {"run": 2}, {"run": 2})
    assert place.rows() == ["m"]
    assert len(runs) == 2


def test_nobody_commits(place: Place) -> None:
    """An application that answers well, and has not committed, has failed: its rows are gone."""

    def pay(request: Request) -> Response:
        with Session(place.engine) as session, request.state.oncely.transaction(session):
            session.execute(text(insertion("m")))
        return JSONResponse({"paid": 1})

    with pytest.raises(EndedError, match="commit it before you return the response"):
        post(application(place, pay), raises=True)
    assert place.rows() == []
    assert place.find(KEY).state is State.FAILED


@pytest.mark.parametrize("is_around", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_dependency_commits_after_the_answer(place: Place, is_around: bool, fails: bool) -> None:
    """The client is answered when that is done: where it fails, nothing has happened, and the
    request runs again. The block may be in the dependency, or in the endpoint.
    """
    errors = [RuntimeError("at the commit")] if fails else []

    def session_of(request: Request) -> Iterator[Session]:
        state = request.state.oncely
        with Session(place.engine) as session, session.begin():
            with state.transaction(session) if is_around else nullcontext():
                yield session
            if errors:
                raise errors.pop()

    shop = fastapi.FastAPI()

    @shop.post("/pay")
    def pay(request: Request, session: Session = fastapi.Depends(session_of)) -> dict[str, int]:
        state = request.state.oncely
        with nullcontext() if is_around else state.transaction(session):
            session.execute(text(insertion("m")))
        return {"paid": 1}

    answers = post(IdempotencyKey(shop, place.ledger, consumer="api"), 3 if fails else 2)
    if fails:
        assert answers.pop(0).status_code == 500
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert place.rows() == ["m"]


def test_a_transaction_after_the_answer(place: Place) -> None:
    """What comes too late to be stored with the request is an error, and is not stored."""
    errors: list[Exception] = []

    def pay(request: Request) -> Response:
        def late() -> None:
            try:
                with Session(place.engine) as session, session.begin():
                    with request.state.oncely.transaction(session):
                        session.execute(text(insertion("m")))
            except ConfigError as error:
                errors.append(error)

        return JSONResponse({}, background=BackgroundTask(late))

    assert post(application(place, pay))[0].status_code == 200
    assert "leave the block before you return the response" in str(errors)
    assert place.rows() == []


def test_a_transaction_once_more(place: Place) -> None:
    """What was rolled back, be it by the commit, can be tried again in the same request."""

    def pay(request: Request) -> Response:
        state = request.state.oncely
        for attempt in (1, 2):
            with Session(place.engine) as session:
                with state.transaction(session) as inbox:
                    session.execute(text(insertion("m")))
                    inbox.send("mails", {"attempt": attempt})
                    answer: Response = state.respond(JSONResponse({"attempt": attempt}))
                if attempt == 1:
                    session.rollback()
                else:
                    session.commit()
        return answer

    first, second = post(application(place, pay), 2)
    assert [first.json(), second.json()] == [{"attempt": 2}] * 2
    assert second.headers["idempotency-replayed"] == "true"
    assert place.rows() == ["m"]


def test_refused_after_a_rollback(place: Place) -> None:
    """An application that rolls back and refuses has done nothing: the key is free again."""

    def pay(request: Request) -> Response:
        with Session(place.engine) as session:
            with request.state.oncely.transaction(session):
                session.execute(text(insertion("m")))
            session.rollback()
        return JSONResponse({"error": "no money"}, 402)

    assert [answer.status_code for answer in post(application(place, pay), 2)] == [402, 402]
    assert place.ledger.find(KEY) is None
    assert place.rows() == []


def test_an_error_after_the_commit(place: Place) -> None:
    """What is committed does not run again, whatever is answered."""
    runs: list[int] = []

    def pay(request: Request) -> Response:
        runs.append(1)
        with Session(place.engine) as session, session.begin():
            with request.state.oncely.transaction(session):
                session.execute(text(insertion("m")))
        raise RuntimeError("in the template")

    first, second = post(application(place, pay), 2)
    assert (first.status_code, second.status_code) == (500, 409)
    assert second.json()["type"].endswith("answer-not-kept")
    assert place.rows() == ["m"]
    assert len(runs) == 1


def test_a_request_without_a_key(place: Place) -> None:
    """The same handler takes requests without a key: what they send goes with their rows."""

    def pay(request: Request) -> Response:
        state = request.state.oncely
        with Session(place.engine) as session, session.begin():
            with state.transaction(session) as inbox:
                session.execute(text(insertion("m")))
                inbox.send("mails", {"to": "anna"})
        answer: Response = state.respond(JSONResponse({"key": state.key}))
        return answer

    answers = post(application(place, pay), 2, key=None)
    assert [answer.json() for answer in answers] == [{"key": None}] * 2
    assert place.rows() == ["m", "m"]
    assert place.ledger.counts() == {}


def test_a_second_transaction(place: Place) -> None:
    """A request has one transaction with its end: a second fails, and its rows are not stored."""

    def pay(request: Request) -> Response:
        for name in ("a", "b"):
            with Session(place.engine) as session, session.begin():
                with request.state.oncely.transaction(session):
                    session.execute(text(insertion(name)))
        return JSONResponse({})

    [answer] = post(application(place, pay))
    assert answer.status_code == 500
    assert place.rows() == ["a"]


@on_a_server_too
@pytest.mark.parametrize("point", ["before_commit", "after_commit", "before_completed"])
def test_killed(place: Place, point: str) -> None:
    """Wherever the server is killed, the effect is there once after the request is repeated; only
    an answer that was not committed with it may be lost.
    """

    def pay(request: Request) -> Response:
        state = request.state.oncely
        with Session(place.engine) as session, session.begin(), state.transaction(session):
            session.execute(text(insertion("m")))
            state.respond(JSONResponse({"paid": 1}, 201))
        return JSONResponse({"paid": 1}, 201)

    app = application(place, pay, lease="300ms")

    def work() -> None:
        # Its connections are the parent's, which lives on.
        place.engine.dispose(close=False)
        post(app)

    assert killed_at(point, work)
    answers = [answer for answer in until_answered(app) if answer.status_code != 409]
    assert [answer.status_code for answer in answers] == [201]
    assert place.rows() == ["m"]


def until_answered(app: Any) -> list[httpx.Response]:
    """The answers to a request that is repeated until it is not told to come back."""
    answers = post(app)
    while answers[-1].status_code == 409 and "retry-after" in answers[-1].headers:
        answers += post(app)
    return answers
