"""DjangoIdempotencyKey: a Django middleware that runs a request once per idempotency key.

Put "oncely.http.DjangoIdempotencyKey" into MIDDLEWARE, and `ONCELY = {"ledger": ..., "consumer":
...}` with the options of `KeyOptions` into the settings.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import finalize

from asgiref.sync import markcoroutinefunction
from django.conf import settings
from django.http import HttpRequest as DjangoRequest
from django.http import HttpResponse, StreamingHttpResponse, UnreadablePostError
from django.http.response import HttpResponseBase

from oncely.core.errors import ConfigError
from oncely.http.answers import HttpAnswer
from oncely.http.http_request import PIECE, HttpRequest, RequestBody
from oncely.http.keyed_requests import KeyedRequests
from oncely.http.passing import Passing, passing
from oncely.http.problems import INCOMPLETE, Refused
from oncely.http.request_state import RequestState, answer_of
from oncely.http.request_work import ErrorAnswer, RequestWork
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
        self._requests = KeyedRequests(ledger, options)
        self._is_async = inspect.iscoroutinefunction(get_response)
        self._running: set[asyncio.Task[HttpResponseBase]] = set()
        """References to running tasks, which nothing else holds once their clients are gone."""
        if self._is_async:
            markcoroutinefunction(self)

    def __call__(self, request: DjangoRequest) -> Any:
        """Handle one request."""
        fields = [*request.headers.items()]
        key = self._requests.key_in(request.method or "", fields)
        if isinstance(key, HttpAnswer):
            return self._answered(_response(key))
        if key is None:
            request.oncely = RequestState(self._requests.ledger)
            return self._get_response(request)
        try:
            body = RequestBody(
                self._requests.max_body,
                self._requests.max_request_body,
                request.META.get("CONTENT_LENGTH"),
            )
            # Django may read it after this.
            finalize(request, body.close)
            _read_into(body, request)
            body.check_whole()
            work = self._work_of(key, request, fields, body)
        except Refused as refused:
            return self._answered(_response(self._requests.told(refused.problem)))
        request.oncely = RequestState(self._requests.ledger, work, key)
        return self._shielded(work, request) if self._is_async else self._run(work, request)

    def process_exception(self, request: DjangoRequest, error: Exception) -> None:
        """Remember the error of a view: the middleware itself gets only a response of 500."""
        request.META[_ERROR] = error

    def _answered(self, response: HttpResponse) -> Any:
        return _awaitable(response) if self._is_async else response

    def _work_of(
        self, key: str, request: DjangoRequest, fields: list[tuple[str, str]], body: RequestBody
    ) -> RequestWork:
        asked = HttpRequest(
            method=request.method or "",
            path=request.path,
            query=request.META.get("QUERY_STRING", ""),
            fields=fields,
            body=body,
            native=request,
            look_up=partial(getattr, request),
        )
        work = self._requests.work(key, asked)
        body.file.seek(0)
        return work

    def _run(self, work: RequestWork, request: DjangoRequest) -> HttpResponseBase:
        response: Any = None
        try:
            with ExitStack() as stack:
                stack.enter_context(work)
                if not work.is_new:
                    return _response(run_inline(work.replayed()))
                with _uncompressed(request):
                    response = self._get_response(request)
                if response.streaming:
                    stream, end = _streamed(work, response)
                    response.streaming_content = Passing(iter(stream), end, stack.pop_all())
                else:
                    work.note(answer_of(response), request.META.get(_ERROR))
                return response
        except Exception as error:  # noqa: BLE001 - raised again where it is the view's.
            return _after(error, work, response)

    async def _shielded(self, work: RequestWork, request: DjangoRequest) -> HttpResponseBase:
        """Run the view; a client that disconnects does not stop it."""
        task = asyncio.ensure_future(self._run_async(work, request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _run_async(self, work: RequestWork, request: DjangoRequest) -> HttpResponseBase:
        response: Any = None
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(work)
                if not work.is_new:
                    return _response(await work.replayed())
                with _uncompressed(request):
                    response = await self._get_response(request)
                if response.streaming:
                    stream, end = _streamed(work, response)
                    response.streaming_content = passing(aiter(stream), end, stack.pop_all())
                else:
                    work.note(answer_of(response), request.META.get(_ERROR))
                return response
        except Exception as error:  # noqa: BLE001 - raised again where it is the view's.
            return _after(error, work, response)


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
    try:
        yield
    finally:
        request.META["HTTP_ACCEPT_ENCODING"] = accepted


def _streamed(work: RequestWork, response: Any) -> tuple[StreamingHttpResponse, Callable[[], None]]:
    """The response's stream, to be read in Django's way after the response got other content; and
    what to call at its end.
    """
    end = partial(work.note_passed, response.status_code, "it is streamed")
    return StreamingHttpResponse(response.streaming_content), end


def _after(error: Exception, work: RequestWork, response: Any) -> HttpResponseBase:
    answer = work.told(error)
    # The view's own response is sent as it is, with its cookies.
    is_own = response is not None and isinstance(error, ErrorAnswer)
    return response if is_own else _response(answer)


def _response(answer: HttpAnswer) -> HttpResponse:
    response = HttpResponse(answer.body, status=answer.status)
    del response["Content-Type"]
    for name, value in answer.fields:
        response[name] = value
    return response


async def _awaitable(response: HttpResponse) -> HttpResponse:
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
