"""WsgiIdempotencyKey: a WSGI middleware that runs a request once per idempotency key."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Unpack

from oncely._util import clock
from oncely.http.answers import HELD_S, HttpAnswer
from oncely.http.http_request import PIECE, HttpRequest, RequestBody, content_length
from oncely.http.key_options import KeyOptions
from oncely.http.keyed_requests import KeyedRequests
from oncely.http.passed_response import PassedResponse
from oncely.http.problems import INCOMPLETE, LENGTH_REQUIRED, Refused
from oncely.http.request_state import RequestState
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]

STATE = "oncely"
"""The key in the environ for the request's state."""


class WsgiIdempotencyKey:
    """Runs `app` once for each Idempotency-Key; repeated requests get the first response.

    The options are those of `KeyOptions`. Raises ConfigError for wrong options. A handler has the
    request's state as `environ["oncely"]`, with Flask also as `g.oncely`.
    """

    def __init__(self, app: WsgiApp, ledger: Ledger, **options: Unpack[KeyOptions]) -> None:
        self._app = app
        self._requests = KeyedRequests(ledger, options, is_async=False)
        if "flask" in sys.modules:
            from flask import request_started

            # The same receiver again, for another application, changes nothing.
            request_started.connect(_show_in_g)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one request."""
        with ExitStack() as stack:
            try:
                state, body = self._received(environ, stack)
            except Refused as refused:
                return start_whole(start_response, self._requests.told(refused.problem))
            if body is None:
                environ[STATE] = state
                return self._app(environ, start_response)
            inner = {**environ, STATE: state, "wsgi.input": body.file}
            # What is kept is the application's own answer: whoever repeats the request may not
            # accept its compression.
            inner.pop("HTTP_ACCEPT_ENCODING", None)
            taken = _Taken(state)
            answer = run_inline(state.answered(partial(taken.answer, self._app, inner)))
            if answer is not None:
                return start_whole(start_response, answer)
            # The request ends when the server has read the response.
            return taken.passed(start_response, stack.pop_all())
        raise AssertionError("nothing is swallowed")

    def _received(
        self, environ: Environ, stack: ExitStack
    ) -> tuple[RequestState, RequestBody | None]:
        """A request, and its body where it has a key, which `stack` closes. Raises Refused where it
        may not run.
        """
        requests, fields = self._requests, fields_in(environ)
        key = requests.key_in(environ["REQUEST_METHOD"], fields)
        if key is None:
            return RequestState(requests), None
        body = requests.body(environ.get("CONTENT_LENGTH"))
        stack.callback(body.close)
        for piece in pieces_in(environ):
            body.write(piece)
        if body.length and _hides_cuts(environ):
            raise Refused(LENGTH_REQUIRED)
        state = RequestState(requests, key, _request(environ, fields, body))
        body.file.seek(0)
        return state, body


def _show_in_g(_: Any, **__: Any) -> None:
    from flask import g, request

    if STATE in request.environ:
        g.oncely = request.environ[STATE]


class _Taken:
    """An application's response, held back as long as it can be kept."""

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self._line: str | None = None
        self._fields: list[tuple[str, str]] = []
        self._held = bytearray()
        self._chunks: Iterator[bytes] = iter(())
        self._close: Callable[[], object] = lambda: None

    def start_response(
        self, line: str, fields: list[tuple[str, str]], exc_info: ExcInfo | None = None
    ) -> Callable[[bytes], object]:
        """The application's start_response: the last call counts. If the response has begun, raises
        the error of `exc_info`, as PEP 3333 requires.
        """
        if exc_info is not None and self._state.why_passed:
            raise exc_info[1].with_traceback(exc_info[2])
        self._line, self._fields = line, fields
        return self._held.extend

    @property
    def line(self) -> str:
        """The status with its phrase. Raises RuntimeError if the application has set none."""
        if self._line is None:
            raise RuntimeError("the application has not called start_response")
        return self._line

    @property
    def status(self) -> int:
        return int(self.line[:3])

    async def answer(self, app: WsgiApp, environ: Environ) -> HttpAnswer | None:
        """The whole response of `app`; None if it passes through."""
        chunks = app(environ, self.start_response)
        self._chunks = iter(chunks)
        self._close = getattr(chunks, "close", self._close)
        is_whole = isinstance(chunks, Sized)
        late_at = math.inf
        with ExitStack() as stack:
            stack.callback(self._close)
            for chunk in self._chunks:
                self._held += chunk
                now = clock.monotonic()
                is_late = now > late_at
                # The application's own time, before its first chunk, does not count.
                late_at = min(late_at, now + HELD_S)
                self._state.why_passed = self._state.reason_to_pass(
                    len(self._held), self._fields, is_whole=is_whole, is_late=is_late
                )
                if self._state.why_passed is not None:
                    stack.pop_all()
                    return None
        return HttpAnswer(self.status, self._fields, bytes(self._held))

    def passed(self, start_response: StartResponse, stack: ExitStack) -> PassedResponse:
        """The chunks of a response that passes through; `stack` is closed after them."""
        stack.callback(self._close)
        try:
            start_response(self.line, self._fields)
            return PassedResponse(self._passing(), self._state, self.status, stack.close)
        except BaseException as error:
            # The server has no response that it would close.
            with stack:
                run_inline(self._state.passed(500, error))
            raise

    def _passing(self) -> Iterator[bytes]:
        # What the application writes is passed on before the chunk that follows it.
        for chunk in chain([b""], self._chunks, [b""]):
            self._held += chunk
            if self._held:
                body = bytes(self._held)
                self._held.clear()
                yield body


def fields_in(environ: Environ) -> list[tuple[str, str]]:
    """The header fields of a request."""
    fields = [
        (name[len("HTTP_") :].replace("_", "-").title(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    apart = {"CONTENT_TYPE": "Content-Type", "CONTENT_LENGTH": "Content-Length"}
    fields += [(field, environ[name]) for name, field in apart.items() if environ.get(name)]
    return fields


def pieces_in(environ: Environ) -> Iterator[bytes]:
    """The pieces of a request's body, never read beyond its end: some servers would wait there for
    the client. Raises Refused if the body is incomplete, or the length is not valid.
    """
    source = environ["wsgi.input"]
    left = content_length(environ.get("CONTENT_LENGTH"))
    is_terminated = environ.get("wsgi.input_terminated")
    while is_terminated or left > 0:
        try:
            piece = source.read(PIECE if is_terminated else min(left, PIECE))
        except OSError:
            # So servers say that the connection was closed in the midst of a chunked body.
            raise Refused(INCOMPLETE) from None
        if not piece:
            break
        yield piece
        left -= len(piece)
    if left > 0:
        raise Refused(INCOMPLETE)


def _hides_cuts(environ: Environ) -> bool:
    """Whether a body that was cut off would look like a whole one: Granian ends it in either way,
    where the request does not say its length.
    """
    is_granian = environ.get("SERVER_SOFTWARE", "").lower().startswith("granian")
    return is_granian and not environ.get("CONTENT_LENGTH")


def start_whole(start_response: StartResponse, answer: HttpAnswer) -> list[bytes]:
    """Send a whole response."""
    start_response(answer.line, [*answer.fields])
    return [answer.body]


def _request(environ: Environ, fields: Sequence[tuple[str, str]], body: RequestBody) -> HttpRequest:
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return HttpRequest(
        method=environ["REQUEST_METHOD"],
        # WSGI decodes the bytes of a path as latin-1.
        path=path.encode("latin-1").decode("utf-8", "surrogateescape"),
        query=environ.get("QUERY_STRING", ""),
        fields=fields,
        body=body,
        native=environ,
        look_up=environ.__getitem__,
    )
