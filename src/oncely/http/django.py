"""DjangoIdempotencyKey: a Django middleware that runs a request once per idempotency key.

Put "oncely.http.DjangoIdempotencyKey" into MIDDLEWARE, and `ONCELY = {"ledger": ..., "consumer":
...}` with the options of `KeyOptions` into the settings.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize

from asgiref.sync import markcoroutinefunction, sync_to_async
from django.conf import settings
from django.http import HttpRequest as DjangoRequest
from django.http import HttpResponse, StreamingHttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from oncely.core.errors import ConfigError
from oncely.http.answers import STREAMED, HttpAnswer, answer_of
from oncely.http.http_request import PIECE, HttpRequest, RequestBody
from oncely.http.keyed_requests import KeyedRequests
from oncely.http.passed_response import PassedResponse, passed_chunks
from oncely.http.problems import INCOMPLETE, Refused
from oncely.http.request_state import RequestState
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger, open_ledger

_ERROR = "oncely.error"
"""The key in a request's META for the error that its view has raised."""


class DjangoIdempotencyKey:
    """Runs a view once for each Idempotency-Key; repeated requests get the first response.

    A view has the request's state as `request.oncely`. If a `scope` uses the user, put this after
    the middleware that sets the user. Raises ConfigError for wrong settings.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[DjangoRequest], Any]) -> None:
        self._get_response = get_response
        ledger, options = _configured()
        self._is_async = inspect.iscoroutinefunction(get_response)
        self._requests = KeyedRequests(ledger, options, is_async=self._is_async)
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: DjangoRequest) -> Any:
        """Handle one request; returns a coroutine where Django is async."""
        return self._handle(request) if self._is_async else run_inline(self._handle(request))

    def process_exception(self, request: DjangoRequest, error: Exception) -> None:
        """Remember the error of a view: the middleware itself gets only a response of 500."""
        request.META[_ERROR] = error

    async def _handle(self, request: DjangoRequest) -> HttpResponseBase:
        try:
            state = await self._received(request)
        except Refused as refused:
            return _response(self._requests.told(refused.problem))
        request.oncely = state
        if state.key is None:
            return await self._view(request)
        running = self._run(state, request)
        # A client that disconnects does not stop the view.
        return await (asyncio.shield(self._requests.follow(running)) if self._is_async else running)

    async def _received(self, request: DjangoRequest) -> RequestState:
        """A request, whose body is read where it has a key. Raises Refused where it may not run."""
        fields = [*request.headers.items()]
        key = self._requests.key_in(request.method or "", fields)
        if key is None:
            return RequestState(self._requests)
        if self._is_async:
            # A user's function may ask Django's database, and a mebibyte of JSON takes half a
            # second.
            return await sync_to_async(self._keyed)(request, key, fields)
        return self._keyed(request, key, fields)

    def _keyed(
        self, request: DjangoRequest, key: str, fields: Sequence[tuple[str, str]]
    ) -> RequestState:
        body = self._requests.body(request.META.get("CONTENT_LENGTH"))
        # Django may read it after this.
        finalize(request, body.close)
        _read_into(body, request)
        body.check_whole()
        asked = HttpRequest(
            method=request.method or "",
            path=request.path,
            query=request.META.get("QUERY_STRING", ""),
            fields=fields,
            body=body,
            native=request,
            look_up=partial(getattr, request),
        )
        state = RequestState(self._requests, key, asked)
        body.file.seek(0)
        return state

    async def _view(self, request: DjangoRequest) -> Any:
        response = self._get_response(request)
        return await response if self._is_async else response

    async def _run(self, state: RequestState, request: DjangoRequest) -> HttpResponseBase:
        response: Any = None
        own: HttpAnswer | None = None

        async def run() -> HttpAnswer | None:
            nonlocal response, own
            with _uncompressed(request):
                response = await self._view(request)
            state.cause = request.META.get(_ERROR)
            if response.streaming:
                state.why_passed = STREAMED
                await _pass_through(response, state, is_async=self._is_async)
            else:
                own = answer_of(response)
            return own

        answer = await state.answered(run)
        # The view's own response is sent as it is, with its cookies.
        return response if answer is None or answer is own else _response(answer)


def _read_into(body: RequestBody, request: Any) -> None:
    """Read a request's body so that Django can read it again.

    Raises Refused where it is incomplete or too large, and ConfigError if another middleware has
    read the body.
    """
    if hasattr(request, "_body"):
        body.write(request.body)
        return
    if request._read_started:
        raise ConfigError(
            "DjangoIdempotencyKey: another middleware has read the request's body; put "
            '"oncely.http.DjangoIdempotencyKey" before it'
        )
    try:
        while piece := request.read(PIECE):
            body.write(piece)
    except UnreadablePostError:
        raise Refused(INCOMPLETE) from None
    request._stream.close()
    request._stream, request._read_started = body.file, False


@contextmanager
def _uncompressed(request: DjangoRequest) -> Iterator[None]:
    """Within the block no compression is accepted: what is kept is the view's own answer, and
    whoever repeats the request may not accept it.
    """
    accepted = request.META.pop("HTTP_ACCEPT_ENCODING", "")
    vars(request).pop("headers", None)  # Django makes them anew.
    try:
        yield
    finally:
        request.META["HTTP_ACCEPT_ENCODING"] = accepted
        vars(request).pop("headers", None)


async def _pass_through(response: Any, state: RequestState, *, is_async: bool) -> None:
    """Let the request end with the response's stream, read in Django's way."""
    stream = StreamingHttpResponse(response.streaming_content)
    status = response.status_code
    if is_async:
        chunks = passed_chunks(aiter(stream), state, status)
        await anext(chunks)
        response.streaming_content = chunks
    else:
        response.streaming_content = PassedResponse(iter(stream), state, status)


def _response(answer: HttpAnswer) -> HttpResponse:
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]
    for name, value in answer.fields:
        response[name] = value
    return response


def _configured() -> tuple[Ledger, dict[str, Any]]:
    """The ledger and the options in the settings."""
    given = getattr(settings, "ONCELY", None)
    options = dict(given) if isinstance(given, Mapping) else {}
    ledger = options.pop("ledger", None)
    if isinstance(ledger, str):
        ledger = open_ledger(ledger)
    if not isinstance(ledger, Ledger):
        raise ConfigError(
            'ONCELY: the settings name no ledger; write ONCELY = {"ledger": '
            '"postgresql://user@host/database", "consumer": "api"}'
        )
    return ledger, options
