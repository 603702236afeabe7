"""Keyed requests: what happens before and after a request with an idempotency key, in any
framework.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Required, TypedDict, get_type_hints
from urllib.parse import quote, urlsplit

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, MessageError
from oncely.core.fingerprint import content_of
from oncely.core.ids import MAX_ID_LENGTH, Id, fingerprint_of, id_of_key
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.sizes import Size, bytes_in
from oncely.core.waiting import digest
from oncely.http import problems
from oncely.http.answers import NEVER_REPLAYED, HttpAnswer
from oncely.http.header_field import FIELD, read_key
from oncely.http.http_request import HttpRequest
from oncely.http.problems import Errors, Problem, problem_json
from oncely.http.request_state import RequestState
from oncely.http.request_work import RequestWork
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.turn import Asked, Turn
from oncely.lifecycle.wrapping import check_called

_log = EventLog(__name__)


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
    """Returns the user or the tenant, whose keys are separate from all others'. The method and the
    path are always part of the key in the ledger."""
    fingerprint: Callable[[HttpRequest], Any]
    """Returns the fingerprint of a request, instead of the one of method, path, query and body: it
    tells apart two requests with one key."""
    bare_keys: bool
    """Whether a key may be without quotation marks, as with Stripe."""
    keep_4xx: bool | Collection[int]
    """Whether responses of 400 to 499 are kept, or which of them. Else the request counts as never
    made, and its key may be used for a corrected request."""
    keep_5xx: bool
    """Whether responses of 500 and more are kept. Else the request has failed, and runs again when
    it is repeated."""
    max_body: Size
    """A larger response passes through, and is not kept. 1MiB by default. A request's own body is
    in memory up to that size, and else in a temporary file."""
    not_replayed: Collection[str]
    """Names of header fields that are not replayed, in addition to those that never are."""
    errors: Errors
    """Makes the response for requests that do not run; application/problem+json by default."""
    documentation: str
    """The URL where the API documents its idempotency keys: problems link to it."""
    lease: Duration
    """Replaces the policy's."""
    policy: Policy


class KeyedRequests:
    """The requests of one application to which idempotency keys apply.

    Raises ConfigError for wrong options.
    """

    def __init__(self, ledger: Ledger, options: Mapping[str, Any]) -> None:
        _check_names(options)
        consumer, policy = options.get("consumer"), options.get("policy", Policy())
        self.handling = Handling.under(
            ledger, consumer or "", policy, options.get("lease"), keep_result=True, is_called=True
        )
        ledger.recorder.works_as("http", self.handling.consumer)
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
        methods = _texts(options.get("methods", ("POST", "PATCH")), "methods", ["POST"])
        self._methods = frozenset(method.upper() for method in methods)
        self._required = _flag(options, "required")
        self._scope = _function(options, "scope")
        self._fingerprint = _function(options, "fingerprint")
        self._takes_bare = _flag(options, "bare_keys")
        self._keep_4xx = _kept_4xx(options.get("keep_4xx", False))
        self._keep_5xx = _flag(options, "keep_5xx")
        fields = _texts(options.get("not_replayed", ()), "not_replayed", ["X-Request-Id"])
        self.not_replayed = NEVER_REPLAYED | {name.lower() for name in fields}
        self._errors: Errors = check_called(
            options.get("errors", problem_json), "errors", ["problem"]
        )
        self._documentation = _url(options.get("documentation"))

    @property
    def ledger(self) -> Ledger:
        """The ledger with the records of the requests."""
        return self.handling.ledger

    def key_in(self, method: str, fields: Sequence[tuple[str, str]]) -> str | HttpAnswer | None:
        """The key of a request. None if it has no key and runs without one; a response if it may
        not run.
        """
        if method not in self._methods:
            return None
        values = [value for name, value in fields if name.lower() == FIELD.lower()]
        try:
            key = read_key(values, takes_bare=self._takes_bare)
        except MessageError as error:
            return self.told(problems.key_unusable(str(error)))
        if key is None and self._required:
            return self.told(problems.KEY_MISSING)
        return key

    def work(self, key: str, request: HttpRequest) -> RequestWork:
        """The work on `request`, which has that key. Raises ConfigError if the request is handled
        under the same consumer already.
        """
        message_id = _message_id(request, self._scope_of(request), key)
        around = getattr(request, "oncely", None)
        if isinstance(around, RequestState) and around.is_within(self.handling, message_id):
            raise ConfigError(
                f"idempotency keys: consumer {self.handling.consumer!r} is twice around this "
                "application; remove one, or give it another consumer"
            )
        message = Message(
            message_id,
            # Read only for a probe: a large body should not be in memory as a whole.
            request.body if callable(self.handling.policy.on_in_doubt) else b"",
            type=f"{request.method} {request.path}",
            content_type=request.headers.get("content-type", ""),
        )
        turn = Turn(Asked(message_id, self._fingerprint_of(request), message))
        return RequestWork(self, turn)

    def _scope_of(self, request: HttpRequest) -> str | None:
        try:
            return None if self._scope is None else id_of_key(self._scope(request))
        except MessageError as error:
            text = str(error).replace("key returned", "returned").replace("order.id", "user.id")
            raise ConfigError(f"scope: {text}") from None

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

    def told(self, problem: Problem) -> HttpAnswer:
        """The response that reports a problem."""
        return self._errors(replace(problem, documentation=self._documentation))


def _message_id(request: HttpRequest, scope: str | None, key: str) -> str:
    """The message id of a request. The text that a client writes into one part of it cannot be
    taken for another part.
    """
    path = quote(request.path, errors="surrogateescape")
    whole = f"{request.method} {path} {quote(scope or '', safe='')} {key}"
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


def _flag(options: Mapping[str, Any], name: str) -> bool:
    given = options.get(name, False)
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
