"""IdempotencyKey: an ASGI middleware that runs a request once per idempotency key."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any, Unpack

from oncely._util.event_log import EventLog
from oncely.http.answers import HELD_S, STREAMED, HttpAnswer, as_text
from oncely.http.http_request import HttpRequest, RequestBody
from oncely.http.key_options import KeyOptions
from oncely.http.keyed_requests import KeyedRequests
from oncely.http.problems import INCOMPLETE, Refused
from oncely.http.request_state import RequestState
from oncely.ledger.async_ledger import running_loop
from oncely.ledger.ledger import Ledger

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = EventLog(__name__)

_ACCEPTED = b"accept-encoding"
_QUICK = 16 * 1024
"""Bodies of at most so many bytes are read as JSON in the event loop: that takes it a millisecond.
"""
_PAST_US = ("http.response.pathsend", "http.response.zerocopysend")
"""Extensions by which the server sends a file: middleware does not see the body."""


class IdempotencyKey:
    """Runs `app` once for each Idempotency-Key; repeated requests get the first response.

    The options are those of `KeyOptions`. Raises ConfigError for wrong options. A handler finds
    its request as `request.state.oncely`, and goes on if the client disconnects.
    """

    def __init__(self, app: AsgiApp, ledger: Ledger, **options: Unpack[KeyOptions]) -> None:
        self._app = app
        self._requests = KeyedRequests(ledger, options, is_async=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; pass on other ASGI events."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            state, body = await self._received(scope, receive)
        except Refused as refused:
            # Whoever has disconnected may still listen, and where not, a server may say so.
            with suppress(OSError):
                await send_whole(send, self._requests.told(refused.problem))
            return
        inner = _with_state(scope, state)
        if body is None:
            await self._app(inner, receive, send)
            return
        running = _Exchange(self._app, state, inner, body, send)
        task = self._requests.follow(running.run())
        task.add_done_callback(lambda _: body.close())
        await asyncio.shield(task)

    async def _received(
        self, scope: Scope, receive: Receive
    ) -> tuple[RequestState, RequestBody | None]:
        """A request, and its body where it has a key. Raises Refused where it may not run."""
        requests, fields = self._requests, as_text(scope["headers"])
        key = requests.key_in(scope["method"], fields)
        if key is None:
            return RequestState(requests), None
        running_loop()  # Raises before a body is there that nobody closes.
        body = requests.body(dict(scope["headers"]).get(b"content-length", b"").decode("latin-1"))
        try:
            await read_body(receive, body.write)
            body.check_whole()
            request = _request(scope, fields, body)
            if requests.asks or body.length > _QUICK:
                # A user's function may wait, and a mebibyte of JSON takes half a second.
                state = await asyncio.to_thread(RequestState, requests, key, request)
            else:
                state = RequestState(requests, key, request)
        except BaseException:
            body.close()
            raise
        return state, body


class _Exchange:
    """One request in the application; its response is held back until the end is stored."""

    def __init__(
        self, app: AsgiApp, state: RequestState, scope: Scope, body: RequestBody, send: Send
    ) -> None:
        self._app = app
        self._state = state
        self._scope = scope
        self._pieces = body.pieces()
        self._is_read = False
        self._to_client = send
        self._is_gone = False
        """Whether the client has disconnected."""
        self._start: Event = {}
        self._fields: list[tuple[str, str]] = []
        self._held = bytearray()
        """What is held back of the body."""
        self._is_begun = False
        """Whether the beginning of a streamed response was sent."""
        self._passing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._late: asyncio.Future[None] | None = None
        self._running: asyncio.Future[None] | None = None
        """The application, where the request is new."""
        self._answered: asyncio.Future[HttpAnswer] = running_loop().create_future()
        """The response, as soon as it is whole; without its body, if that was streamed."""
        self._may_go_on = asyncio.Event()
        """Whether the application may go on after its response: the end is stored, or waits for the
        application's commit.
        """

    async def run(self) -> None:
        """Handle the request, and return when the application has returned."""
        try:
            answer = await self._state.answered(self._answer)
        finally:
            self._may_go_on.set()
            if self._timer is not None:
                self._timer.cancel()
        if answer is not None and self._state.why_passed is None:
            await send_whole(self._send, answer)
        if self._running is not None:
            # The background work of an application, after its response.
            await self._running

    async def _answer(self) -> HttpAnswer:
        """The response of the application, which begins here."""
        self._running = running = asyncio.ensure_future(
            self._app(self._scope, self._receive, self._take)
        )
        try:
            either: list[asyncio.Future[Any]] = [running, self._answered]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if await self._state.may_be_committed():
                # As a dependency of FastAPI does after the response.
                self._may_go_on.set()
                await running
        except asyncio.CancelledError:
            # The loop ends: no part of the application goes on without its claim.
            running.cancel()
            await asyncio.wait({running})
            raise
        if not self._answered.done():
            running.result()  # Raises the application's error.
            raise RuntimeError("the application has returned before its response was complete")
        return self._answered.result()

    async def _send(self, event: Event) -> None:
        """Send an event, unless the client has disconnected: applications do not care."""
        if self._is_gone:
            return
        try:
            await self._to_client(event)
        except OSError:
            self._is_gone = True
            _log.info(
                "a client closed its connection: %(reason)s; the request goes on",
                exc_info=True,
                extra={"event": "client_disconnected"},
            )

    async def _receive(self) -> Event:
        if not self._is_read:
            piece = next(self._pieces, None)
            self._is_read = piece is None
            return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}
        # The application is not told of a disconnect: a client that is gone does not stop it.
        await self._may_go_on.wait()
        return {"type": "http.disconnect"}

    async def _take(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            if self._start:
                raise RuntimeError("the application has started its response twice")
            self._start = event
            self._fields = as_text(event.get("headers", ()))
            self._state.why_passed = "it has trailers" if event.get("trailers") else None
        elif event["type"] == "http.response.body":
            await self._take_body(event.get("body", b""), more=event.get("more_body", False))
        else:
            await self._send(event)

    async def _take_body(self, body: bytes, *, more: bool) -> None:
        if not self._start:
            raise RuntimeError("the application has sent a body before it has started its response")
        if self._answered.done():
            raise RuntimeError("the application has sent more after the end of its response")
        self._held += body
        await self._hold_or_pass_on(is_whole=not more)
        if more:
            return
        if self._timer is not None:
            self._timer.cancel()
        held = bytes(self._held)
        self._held.clear()
        self._answered.set_result(HttpAnswer(self._start["status"], self._fields, held))
        await self._may_go_on.wait()
        if self._state.why_passed is not None:
            await self._send({"type": "http.response.body", "body": b""})

    async def _hold_or_pass_on(self, *, is_whole: bool) -> None:
        state, held, fields = self._state, len(self._held), self._fields
        if state.why_passed is None:
            state.why_passed = state.reason_to_pass(held, fields, is_whole=is_whole)
        if state.why_passed is not None:
            await self._pass_on()
        elif self._timer is None and state.reason_to_pass(
            held, fields, is_whole=is_whole, is_late=True
        ):
            self._timer = running_loop().call_later(HELD_S, self._hold_no_longer)

    def _hold_no_longer(self) -> None:
        if self._state.why_passed is None:
            self._state.why_passed = STREAMED
            self._late = asyncio.ensure_future(self._pass_on())

    async def _pass_on(self) -> None:
        async with self._passing:
            if not self._is_begun:
                self._is_begun = True
                await self._send(self._start)
            if self._held:
                body = bytes(self._held)
                self._held.clear()
                event = {"type": "http.response.body", "body": body, "more_body": True}
                await self._send(event)


async def read_body(receive: Receive, write: Callable[[bytes], object]) -> None:
    """Read a request's body piece by piece. Raises Refused if the client disconnects before its
    end.
    """
    more = True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Refused(INCOMPLETE)
        write(event.get("body", b""))
        more = event.get("more_body", False)


async def send_whole(send: Send, answer: HttpAnswer) -> None:
    """Send a whole response."""
    headers = [(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in answer.fields]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


def _with_state(scope: Scope, state: RequestState) -> Scope:
    """The scope as the application gets it. What is kept is its own answer: whoever repeats the
    request may not accept its compression.
    """
    scope.setdefault("state", {})["oncely"] = state
    changed: dict[str, Any] = {}
    if extensions := scope.get("extensions"):
        seen = {name: value for name, value in extensions.items() if name not in _PAST_US}
        changed["extensions"] = seen
    if state.key is not None and _ACCEPTED in dict(scope["headers"]):
        changed["headers"] = [each for each in scope["headers"] if each[0] != _ACCEPTED]
    return {**scope, **changed} if changed else scope


def _request(scope: Scope, fields: Sequence[tuple[str, str]], body: RequestBody) -> HttpRequest:
    def look_up(name: str) -> Any:
        state = scope.get("state") or {}
        return state[name] if name in state else scope[name]

    return HttpRequest(
        method=scope["method"],
        path=scope["path"],
        query=scope.get("query_string", b"").decode("latin-1"),
        fields=fields,
        body=body,
        native=scope,
        look_up=look_up,
    )
