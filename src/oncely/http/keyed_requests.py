"""Keyed requests: what happens before and after a request with an idempotency key, whatever
framework brings it.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Required, TypedDict, get_type_hints
from urllib.parse import quote, urlsplit

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
from oncely.http.request_work import Exchange, RequestWork
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.turn import Asked, Turn
from oncely.lifecycle.wrapping import check_called

_log = logging.getLogger(__name__)

_FIRST_5XX = 500
_FIRST_4XX = 400


class KeyOptions(TypedDict, total=False):
    """How requests are told apart, and what of their answers is kept."""

    consumer: Required[str]
    """Under which the ledger knows them."""
    methods: Sequence[str]
    """To requests of other methods nothing happens. POST and PATCH by default."""
    required: bool
    """Whether a request without a key is refused; else, by default, it runs as if oncely was not
    there."""
    scope: Callable[[HttpRequest], Id | None]
    """Returns the user, or the tenant: nobody meets the keys of others. The method and the path
    are always part of what a key is looked up by."""
    fingerprint: Callable[[HttpRequest], Any]
    """Returns what tells two requests under one key apart, instead of method, path, query and
    body."""
    bare_keys: bool
    """Whether a key may stand without quotation marks, as with Stripe."""
    keep_4xx: bool | Collection[int]
    """Whether answers of 400 to 499 are kept, or which of them; else the request counts as never
    made, and the key may be used for one that is put right."""
    keep_5xx: bool
    """Whether answers of 500 and more are kept; else the request has failed, and runs again when it
    is repeated."""
    max_body: Size
    """Answers beyond that pass through, and are not kept. 1MiB by default. A request's own body is
    in memory up to that size, and in a temporary file beyond it."""
    not_replayed: Collection[str]
    """Names of header fields that a repetition is not given, beside those that never are."""
    errors: Errors
    """Makes the answer for requests that do not run; application/problem+json by default."""
    documentation: str
    """The URL at which the API describes its idempotency keys: problems link to it."""
    lease: Duration
    """Replaces the policy's."""
    policy: Policy


class KeyedRequests:
    """The requests of one application to which idempotency keys apply.

    Raises ConfigError for options that cannot be meant.
    """

    def __init__(self, ledger: Ledger, options: Mapping[str, Any]) -> None:
        _check_names(options)
        consumer, policy = options.get("consumer"), options.get("policy", Policy())
        self.handling = Handling.under(
            ledger, consumer or "", policy, options.get("lease"), keep_result=True, is_called=True
        )
        self.max_body = bytes_in(options.get("max_body", "1MiB"), "max_body")
        self._methods = _methods(options.get("methods", ("POST", "PATCH")))
        self._required = bool(options.get("required", False))
        self._scope = _function(options, "scope")
        self._fingerprint = _function(options, "fingerprint")
        self._takes_bare = bool(options.get("bare_keys", False))
        self._keep_4xx = options.get("keep_4xx", False)
        self._keep_5xx = bool(options.get("keep_5xx", False))
        names = {name.lower() for name in options.get("not_replayed", ())}
        self.not_replayed = NEVER_REPLAYED | names
        self._errors: Errors = options.get("errors", problem_json)
        self._documentation = _url(options.get("documentation"))

    @property
    def ledger(self) -> Ledger:
        """Where they are recorded."""
        return self.handling.ledger

    def key_in(self, method: str, fields: Sequence[tuple[str, str]]) -> str | HttpAnswer | None:
        """The key of a request; None where it has none, and runs all the same; the answer where it
        does not.
        """
        if method not in self._methods:
            return None
        values = [value for name, value in fields if name.lower() == FIELD.lower()]
        try:
            key = read_key(values, takes_bare=self._takes_bare)
        except MessageError as error:
            return self.told(problems.key_unusable(str(error)))
        if key is None and self._required:
            return self.told(problems.key_missing())
        return key

    def exchange(self, key: str, request: HttpRequest) -> Exchange:
        """What happens around the handling of `request`, which has that key."""
        message_id = _message_id(request, self._scope_of(request), key)
        # What a probe is asked with; a file is nothing for it.
        is_small = request.length <= self.max_body
        message = Message(
            message_id,
            request.body if is_small else b"",
            type=f"{request.method} {request.path}",
            content_type=request.headers.get("content-type", ""),
        )
        turn = Turn(Asked(message_id, self._fingerprint_of(request), message))
        return Exchange(self, RequestWork(self.handling, turn, self.not_replayed))

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
        """Whether an answer of that status is given to whoever repeats the request."""
        if status >= _FIRST_5XX:
            return self._keep_5xx
        if status < _FIRST_4XX:
            return True
        kept = self._keep_4xx
        return kept if isinstance(kept, bool) else status in kept

    def told(self, problem: Problem) -> HttpAnswer:
        """The answer that tells of a problem."""
        if self._documentation is None:
            return self._errors(problem)
        name, status, code, title, detail, retry_s = (
            getattr(problem, each) for each in Problem.__slots__[:6]
        )
        return self._errors(
            Problem(name, status, code, title, detail, retry_s, self._documentation)
        )


def _message_id(request: HttpRequest, scope: str | None, key: str) -> str:
    """By which the ledger knows a request: nothing that a client writes into one part of it can be
    taken for another part.
    """
    path = quote(request.path, errors="surrogateescape")
    whole = f"{request.method} {path} {quote(scope or '', safe='')} {key}"
    if len(whole) <= MAX_ID_LENGTH:
        return whole
    return f"{request.method} {digest(whole)}"


# ---- What cannot be meant ----------------------------------------------------------------------


def _check_names(options: Mapping[str, Any]) -> None:
    known = get_type_hints(KeyOptions)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"idempotency keys: {name} is not an option; known: {', '.join(known)}"
            )
    if "consumer" not in options:
        raise ConfigError('idempotency keys: consumer is missing; write consumer="api"')


def _methods(methods: Sequence[str]) -> frozenset[str]:
    if isinstance(methods, str):
        raise ConfigError(f'methods: write a list of them, such as ["{methods}"]')
    return frozenset(method.upper() for method in methods)


def _function(options: Mapping[str, Any], name: str) -> Callable[[HttpRequest], Any] | None:
    given = options.get(name)
    return None if given is None else check_called(given, name, ["request"])


def _url(documentation: str | None) -> str | None:
    if documentation is not None and not urlsplit(documentation).netloc:
        raise ConfigError(
            f"documentation: {documentation!r} is not a URL; write "
            '"https://example.com/docs/idempotency"'
        )
    return documentation
