"""Keyed requests: which requests have an idempotency key, and what all of an application share."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely._util.outage import Outage
from oncely.core.durations import positive_seconds
from oncely.core.errors import ConfigError, MessageError, StoreUnavailable
from oncely.core.fingerprint import content_of
from oncely.core.ids import MAX_ID_LENGTH, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.sizes import bytes_in
from oncely.core.turn import Turn
from oncely.core.waiting import digest
from oncely.http import problems
from oncely.http.answers import NEVER_REPLAYED, HttpAnswer, as_replay, to_replay
from oncely.http.header_field import FIELD, read_key
from oncely.http.http_request import HttpRequest, RequestBody
from oncely.http.key_options import (
    check_names,
    flag,
    function,
    kept_by,
    kept_errors,
    texts,
    url,
)
from oncely.http.problems import Errors, Problem, Refused, problem_json
from oncely.ledger.driver import Driver, SyncDriver, run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.wrapping import check_called

T = TypeVar("T")
Steps = Coroutine[Any, Any, T]

_log = EventLog(__name__)

_FIELD = FIELD.lower()
_LEASE = "30s"
_THREADS = 64
"""How many requests of sync applications may wait for the ledger at a time."""


class LateError(StoreUnavailable):
    """The ledger has not answered in time: what it was asked goes on."""


class KeyedRequests:
    """The requests of one application to which idempotency keys apply.

    `options` are those of `KeyOptions`. Raises ConfigError for wrong ones.
    """

    def __init__(self, ledger: Ledger, options: Mapping[str, Any], *, is_async: bool) -> None:
        check_names(options)
        policy = options.get("policy", Policy())
        is_default = getattr(policy, "lease", None) == Policy().lease
        self.lifecycle = Lifecycle.under(
            ledger,
            options["consumer"] or "",
            policy,
            options.get("lease", _LEASE if is_default else None),
            keep_result=True,
            is_called=True,
        )
        lifecycle = self.lifecycle
        self.driver: Driver = lifecycle.async_driver if is_async else lifecycle.sync_driver
        ledger.recorder.works_as("http", lifecycle.consumer)
        self.outage = Outage(
            _log,
            "request_refused",
            "request '%(message_id)s' was answered with %(status)s: %(reason)s; so are others "
            "with keys until the store can be reached",
            "requests_accepted",
            "requests with keys are accepted again after %(away_s)s s",
        )
        """While the store is away, and requests do not run for that reason."""
        self.max_body = bytes_in(options.get("max_body", "1MiB"), "max_body")
        """The largest response that is kept, in bytes."""
        most = options.get("max_request_body", "10MiB")
        self._max_request_body = bytes_in(most, "max_request_body")
        self._timeout_s = positive_seconds(
            options.get("timeout", "5s"), "timeout", 'refuse all; write "5s"'
        )
        methods = texts(options, "methods", ("POST", "PATCH"), "POST")
        self._methods = {method.upper() for method in methods}
        self._required = flag(options, "required")
        self._scope = function(options, "scope")
        self._credentials = texts(
            options, "credentials", ("Authorization", "Cookie"), "Authorization"
        )
        self._authorize = function(options, "authorize")
        self.asks = self._authorize is not None
        """Whether a function of the user's is asked about each request, which may take long."""
        self._fingerprint = function(options, "fingerprint")
        self._takes_bare = flag(options, "bare_keys", default=True)
        self._kept_errors = kept_errors(options)
        self._keep_5xx = flag(options, "keep_5xx")
        self.not_replayed = NEVER_REPLAYED | texts(options, "not_replayed", (), "X-Request-Id")
        self.keep, self._restore = kept_by(options)
        errors: Errors = options.get("errors", problem_json)
        self._errors = check_called(errors, "errors", ["problem"])
        self._documentation = url(options)
        self._has_told_no_scope = False
        self._following: set[asyncio.Task[Any]] = set()
        """References to running tasks, which nothing else holds."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the threads to the parent: called in a forked child."""
        self._threads = ThreadPoolExecutor(_THREADS, "oncely-http")

    def key_in(self, method: str, fields: Sequence[tuple[str, str]]) -> str | None:
        """The key of a request; None if it has none, and runs without. Raises Refused if it may not
        run.
        """
        if method not in self._methods:
            return None
        values = [value for name, value in fields if name.lower() == _FIELD]
        try:
            key = read_key(values, takes_bare=self._takes_bare)
        except MessageError as error:
            raise Refused(problems.key_unusable(str(error))) from None
        if key is None and self._required:
            raise Refused(problems.KEY_MISSING)
        return key

    def body(self, declared: str | None) -> RequestBody:
        """The body, to be read, of a request that says it has this length. Raises Refused."""
        return RequestBody(self.max_body, self._max_request_body, declared)

    def turn(self, key: str, request: HttpRequest) -> Turn:
        """The turn of `request`, which has that key. Raises Refused where it may not run."""
        if self._authorize is not None and not self._authorize(request):
            raise Refused(problems.NOT_AUTHORIZED)
        message_id = _message_id(request, self._caller_of(request), key)
        if self._fingerprint is None:
            fingerprint = request.fingerprint()
        else:
            fingerprint = fingerprint_of(content_of(self._fingerprint(request)))
        message = Message(
            message_id,
            # Read only for a probe: a large body should not be in memory as a whole.
            request.body if callable(self.lifecycle.policy.on_in_doubt) else b"",
            type=f"{request.method} {request.path}",
            content_type=request.headers.get("content-type", ""),
        )
        return Turn(message_id, fingerprint, message)

    def _caller_of(self, request: HttpRequest) -> str:
        """Whose key it is: a digest, since it may be a token, and ids are shown to people. Empty
        for a request without credentials.
        """
        if self._scope is None:
            shown = [value for name, value in request.fields if name.lower() in self._credentials]
            return digest(*shown) if shown else ""
        try:
            scope = id_of_key(self._scope(request))
        except MessageError as error:
            text = str(error).replace("key returned", "returned").replace("order.id", "user.id")
            raise ConfigError(f"scope: {text}") from None
        if scope:
            return digest(scope)
        if not self._has_told_no_scope:
            self._has_told_no_scope = True
            _log.error(
                "scope: it returned nothing for %(method)s %(path)s; return str(user.id), and "
                "something that is only theirs for requests without a user: requests for which it "
                "returns nothing are answered with 500",
                extra={
                    "event": "scope_missing",
                    "method": request.method,
                    "path": request.path,
                },
            )
        raise Refused(problems.SCOPE_MISSING)

    def keeps(self, status: int) -> bool:
        """Whether a response of that status is kept for repeated requests."""
        return status < 400 or status in self._kept_errors or (status >= 500 and self._keep_5xx)

    def replayed(self, kept: Any) -> HttpAnswer | None:
        """The response that was kept, for a repetition; None if none was."""
        answer = to_replay(kept)
        return None if answer is None else as_replay(self._restore(answer))

    def told(self, problem: Problem) -> HttpAnswer:
        """The response that reports a problem."""
        return self._errors(replace(problem, documentation=self._documentation))

    def follow(self, steps: Steps[T]) -> asyncio.Task[T]:
        """Start a task for `steps`, which goes on when the request is cancelled that waits for it:
        its client has disconnected.
        """
        task = asyncio.ensure_future(steps)
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return task

    async def in_time(
        self,
        driver: Driver,
        steps: Steps[None],
        late: Callable[[], Steps[None]] | None = None,
    ) -> None:
        """Carry out `steps`, which use `driver`. Raises LateError after the timeout: they go on,
        and `late` follows where they end well.
        """
        done: Future[None] | asyncio.Task[None]
        if isinstance(driver, SyncDriver):
            done = self._threads.submit(copy_context().run, run_inline, steps)
            is_late = True
            try:
                is_late = bool(wait([done], self._timeout_s).not_done)
            finally:
                # Also where a signal handler raises.
                if is_late and late is not None:
                    done.add_done_callback(lambda ended: _is_well(ended) and run_inline(late()))
        else:
            done = asyncio.ensure_future(steps)
            try:
                await asyncio.wait([done], timeout=self._timeout_s)
            except asyncio.CancelledError:
                done.cancel()
                await asyncio.wait([done])
                raise
            if is_late := not done.done():
                self.follow(_followed(done, late))
        if is_late:
            raise LateError(f"the ledger has not answered within {self._timeout_s:g} s")
        return done.result()


async def _followed(done: asyncio.Task[None], late: Callable[[], Steps[None]] | None) -> None:
    await asyncio.wait([done])
    if _is_well(done) and late is not None:
        await late()


def _is_well(ended: Future[None] | asyncio.Task[None]) -> bool:
    return not ended.cancelled() and ended.exception() is None


def _message_id(request: HttpRequest, caller: str, key: str) -> str:
    """The message id of a request. The text that a client writes into one part of it cannot be
    taken for another part.
    """
    path = quote(request.path, errors="surrogateescape")
    whole = f"{request.method} {path} {caller} {key}"
    if len(whole) <= MAX_ID_LENGTH:
        return whole
    return f"{request.method} {digest(whole)}"
