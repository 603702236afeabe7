"""Keyed requests: what happens before and after a request with an idempotency key, in any
framework.
"""

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Required, TypedDict, get_type_hints
from urllib.parse import quote, urlsplit

from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely._util.outage import Outage
from oncely.core.durations import Duration, positive_seconds
from oncely.core.errors import ConfigError, MessageError
from oncely.core.fingerprint import content_of
from oncely.core.ids import MAX_ID_LENGTH, Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.sizes import Size, bytes_in
from oncely.core.turn import Turn
from oncely.core.waiting import digest
from oncely.http import problems
from oncely.http.answers import NEVER_REPLAYED, HttpAnswer, as_replay, to_replay
from oncely.http.header_field import FIELD, read_key
from oncely.http.http_request import HttpRequest
from oncely.http.problems import Errors, Problem, Refused, problem_json
from oncely.http.request_state import RequestState
from oncely.http.request_work import LateError, RequestWork
from oncely.ledger.driver import Driver, SyncDriver, run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.wrapping import check_called

_log = EventLog(__name__)

Keep = Callable[[HttpAnswer], HttpAnswer | None]
Restore = Callable[[HttpAnswer], HttpAnswer]

_FIELD = FIELD.lower()
_LEASE = "30s"
_THREADS = 64
"""How many requests of sync applications may wait for the ledger at a time."""


class KeyOptions(TypedDict, total=False):
    """Options: how requests are told apart, and which responses are kept."""

    consumer: Required[str]
    """The consumer's name in the ledger."""
    methods: Sequence[str]
    """The methods with idempotency keys, POST and PATCH by default; others pass unchanged."""
    required: bool
    """Whether a request without a key is refused. By default it is not: it runs as without
    oncely."""
    scope: Callable[[HttpRequest], Id | None]
    """Returns the stable name of the user or the tenant, whose keys are separate from all others'.
    Only a digest of it is stored. Without it, keys are separate by `credentials`. The method and
    the path are always part of the key in the ledger."""
    credentials: Collection[str]
    """The header fields that tell callers apart where there is no `scope`: Authorization and
    Cookie by default. A caller whose token is renewed is another one."""
    authorize: Callable[[HttpRequest], bool]
    """Returns whether its sender may make the request: else it is answered with 403. For a
    middleware that stands outside of the application's own authentication. Called in a thread where
    the application is async."""
    fingerprint: Callable[[HttpRequest], Any]
    """Returns the fingerprint of a request, instead of the one of method, path, query and body: it
    tells apart two requests with one key."""
    bare_keys: bool
    """Whether a key may be without quotation marks, as nearly all clients send it: True by default.
    With False, only as the draft writes it."""
    keep_4xx: bool | Collection[int]
    """Whether responses of 400 to 499 are kept, or which of them. Else the request counts as never
    made, and its key may be used for a corrected request."""
    keep_5xx: bool
    """Whether responses of 500 and more are kept. Else the request has failed, and runs again when
    it is repeated."""
    max_body: Size
    """A larger response passes through, and is not kept. 1MiB by default. A request's own body is
    in memory up to that size, and else in a temporary file."""
    max_request_body: Size
    """A request with a key and a larger body is answered with 413. 10MiB by default."""
    keep: Keep | tuple[Keep, Restore]
    """Returns the response as it is kept, such as without what is secret in it; None keeps nothing
    of it, and a repetition is answered with 409. Or a pair: the second function makes of what was
    kept the response to replay, as one that decrypts it."""
    not_replayed: Collection[str]
    """Names of header fields that are not replayed, in addition to those that never are."""
    errors: Errors
    """Makes the response for requests that do not run; application/problem+json by default."""
    documentation: str
    """The URL where the API documents its idempotency keys: problems link to it."""
    lease: Duration
    """Replaces the policy's: 30s by default, extended while the application runs. After the death
    of a server, its requests wait so long."""
    timeout: Duration
    """How long a request waits for the ledger, 5s by default: a new one is then answered with 503,
    unless the policy's `on_outage` says otherwise; the response of the application is sent, and
    stored as soon as the ledger answers."""
    policy: Policy


class KeyedRequests:
    """The requests of one application to which idempotency keys apply.

    Raises ConfigError for wrong options.
    """

    def __init__(self, ledger: Ledger, options: Mapping[str, Any]) -> None:
        _check_names(options)
        consumer, policy = options.get("consumer"), options.get("policy", Policy())
        is_default = getattr(policy, "lease", None) == Policy().lease
        lease = options.get("lease", _LEASE if is_default else None)
        self.lifecycle = Lifecycle.under(
            ledger, consumer or "", policy, lease, keep_result=True, is_called=True
        )
        ledger.recorder.works_as("http", self.lifecycle.consumer)
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
        self.max_request_body = bytes_in(
            options.get("max_request_body", "10MiB"), "max_request_body"
        )
        self._timeout_s = positive_seconds(
            options.get("timeout", "5s"), "timeout", 'refuse all; write "5s"'
        )
        methods = _texts(options.get("methods", ("POST", "PATCH")), "methods", ["POST"])
        self._methods = frozenset(method.upper() for method in methods)
        self._required = _flag(options, "required")
        self._scope = _function(options, "scope")
        credentials = options.get("credentials", ("Authorization", "Cookie"))
        names = _texts(credentials, "credentials", ["Authorization"])
        self._credentials = frozenset(name.lower() for name in names)
        self._authorize = _function(options, "authorize")
        self.asks = self._authorize is not None
        """Whether a function of the user's is asked about each request, which may take long."""
        self._fingerprint = _function(options, "fingerprint")
        self._takes_bare = _flag(options, "bare_keys", default=True)
        self._keep_4xx = _kept_4xx(options.get("keep_4xx", False))
        self._keep_5xx = _flag(options, "keep_5xx")
        fields = _texts(options.get("not_replayed", ()), "not_replayed", ["X-Request-Id"])
        self.not_replayed = NEVER_REPLAYED | {name.lower() for name in fields}
        self.keep, self._restore = _kept_by(options.get("keep"))
        self._errors: Errors = check_called(
            options.get("errors", problem_json), "errors", ["problem"]
        )
        self._documentation = _url(options.get("documentation"))
        self._has_told_no_scope = False
        self._following: set[asyncio.Task[None]] = set()
        """References to running tasks, which nothing else holds."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the threads to the parent: called in a forked child."""
        self._threads = ThreadPoolExecutor(_THREADS, "oncely-http")

    @property
    def ledger(self) -> Ledger:
        """The ledger with the records of the requests."""
        return self.lifecycle.ledger

    def key_in(self, method: str, fields: Sequence[tuple[str, str]]) -> str | HttpAnswer | None:
        """The key of a request. None if it has no key and runs without one; a response if it may
        not run.
        """
        if method not in self._methods:
            return None
        values = [value for name, value in fields if name.lower() == _FIELD]
        try:
            key = read_key(values, takes_bare=self._takes_bare)
        except MessageError as error:
            return self.told(problems.key_unusable(str(error)))
        if key is None and self._required:
            return self.told(problems.KEY_MISSING)
        return key

    def work(self, key: str, request: HttpRequest) -> RequestWork:
        """The work on `request`, which has that key. Raises Refused where it may not run, and
        ConfigError if the request is handled under the same consumer already.
        """
        if self._authorize is not None and not self._authorize(request):
            raise Refused(problems.NOT_AUTHORIZED)
        message_id = _message_id(request, self._caller_of(request), key)
        around = getattr(request, "oncely", None)
        if isinstance(around, RequestState) and around.is_within(self.lifecycle, message_id):
            raise ConfigError(
                f"idempotency keys: consumer {self.lifecycle.consumer!r} is twice around this "
                "application; remove one, or give it another consumer"
            )
        message = Message(
            message_id,
            # Read only for a probe: a large body should not be in memory as a whole.
            request.body if callable(self.lifecycle.policy.on_in_doubt) else b"",
            type=f"{request.method} {request.path}",
            content_type=request.headers.get("content-type", ""),
        )
        turn = Turn(message_id, self._fingerprint_of(request), message)
        return RequestWork(self, turn)

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
        if not scope:
            self._log_no_scope(request)
            raise Refused(problems.SCOPE_MISSING)
        return digest(scope)

    def _log_no_scope(self, request: HttpRequest) -> None:
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

    def _fingerprint_of(self, request: HttpRequest) -> str:
        if self._fingerprint is None:
            return request.fingerprint()
        return fingerprint_of(content_of(self._fingerprint(request)))

    def keeps(self, status: int) -> bool:
        """Whether a response of that status is kept for repeated requests."""
        if status >= 500:
            return self._keep_5xx
        if status < 400:
            return True
        kept = self._keep_4xx
        return kept if isinstance(kept, bool) else status in kept

    def replayed(self, kept: Any) -> HttpAnswer | None:
        """The response that was kept, for a repetition; None if none was."""
        answer = to_replay(kept)
        return None if answer is None else as_replay(self._restore(answer))

    async def in_time(
        self,
        driver: Driver,
        steps: Coroutine[Any, Any, None],
        late: Callable[[], Coroutine[Any, Any, None]],
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
                if is_late:
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
                done.add_done_callback(lambda ended: self._follow(ended, late))
        if is_late:
            raise LateError(f"the ledger has not answered within {self._timeout_s:g} s")
        return done.result()

    def _follow(
        self, ended: "asyncio.Task[None]", late: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        if _is_well(ended):
            task = asyncio.ensure_future(late())
            self._following.add(task)
            task.add_done_callback(self._following.discard)

    def told(self, problem: Problem) -> HttpAnswer:
        """The response that reports a problem."""
        return self._errors(replace(problem, documentation=self._documentation))


def _is_well(ended: "Future[None] | asyncio.Task[None]") -> bool:
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


def _check_names(options: Mapping[str, Any]) -> None:
    known = get_type_hints(KeyOptions)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"idempotency keys: {name} is not an option; known: {', '.join(known)}"
            )
    if "consumer" not in options:
        raise ConfigError('idempotency keys: consumer is missing; write consumer="api"')


def _texts(given: object, name: str, example: Sequence[str]) -> Collection[str]:
    """Check for a collection of texts; one text alone would be a collection of letters."""
    if isinstance(given, str):
        raise ConfigError(f'{name}: write a list of them, such as ["{given}"]')
    if not isinstance(given, Collection) or not all(isinstance(each, str) for each in given):
        raise ConfigError(
            f"{name}: {given!r} is not a list of text; write one, such as {json.dumps(example)}"
        )
    return given


def _flag(options: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    given = options.get(name, default)
    if not isinstance(given, bool):
        raise ConfigError(f"{name}: {given!r} is not a bool; write True or False")
    return given


def _kept_4xx(given: Any) -> bool | Collection[int]:
    if isinstance(given, bool):
        return given
    is_some = isinstance(given, Collection) and not isinstance(given, str | bytes)
    if not is_some or not all(each in range(400, 500) for each in given):
        raise ConfigError(
            f"keep_4xx: {given!r} is not a bool or a list of statuses from 400 to 499; "
            "write True or [402, 409]"
        )
    statuses: Collection[int] = given
    return statuses


def _kept_by(given: Any) -> tuple[Keep | None, Restore]:
    """The functions before a response is kept, if there is one, and after."""
    if given is None:
        return None, _unchanged
    if not isinstance(given, tuple):
        return check_called(given, "keep", ["answer"]), _unchanged
    if len(given) != 2:
        raise ConfigError(
            "keep: it is a function, or a pair of functions; write keep=(encrypted, decrypted)"
        )
    to_keep, to_replay = (check_called(each, "keep", ["answer"]) for each in given)
    return to_keep, to_replay


def _unchanged(answer: HttpAnswer) -> HttpAnswer:
    return answer


def _function(options: Mapping[str, Any], name: str) -> Callable[[HttpRequest], Any] | None:
    given = options.get(name)
    return None if given is None else check_called(given, name, ["request"])


def _url(documentation: object) -> str | None:
    if documentation is None:
        return None
    if not isinstance(documentation, str) or not urlsplit(documentation).netloc:
        raise ConfigError(
            f"documentation: {documentation!r} is not a URL; write "
            '"https://example.com/docs/idempotency"'
        )
    return documentation
