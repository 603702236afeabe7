"""Key options: what users say about requests with idempotency keys, read and checked."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Required, TypedDict, get_type_hints
from urllib.parse import urlsplit

from oncely.core.durations import Duration
from oncely.core.errors import ConfigError
from oncely.core.ids import Id
from oncely.core.policy import Policy
from oncely.core.sizes import Size
from oncely.http.answers import HttpAnswer
from oncely.http.http_request import HttpRequest
from oncely.http.problems import Errors
from oncely.lifecycle.wrapping import check_called

Keep = Callable[[HttpAnswer], HttpAnswer | None]
Restore = Callable[[HttpAnswer], HttpAnswer]
Options = Mapping[str, Any]
"""KeyOptions that are not checked yet: each function here raises ConfigError for a wrong one."""


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


def check_names(options: Options) -> None:
    """Check that all options are known, and that the consumer is there."""
    known = get_type_hints(KeyOptions)
    for name in options:
        if name not in known:
            raise ConfigError(
                f"idempotency keys: {name} is not an option; known: {', '.join(known)}"
            )
    if "consumer" not in options:
        raise ConfigError('idempotency keys: consumer is missing; write consumer="api"')


def texts(options: Options, name: str, default: Sequence[str], example: str) -> frozenset[str]:
    """A collection of texts, in lower case; one text alone would be a collection of letters."""
    given = options.get(name, default)
    if isinstance(given, str):
        raise ConfigError(f'{name}: write a list of them, such as ["{given}"]')
    if not isinstance(given, Collection) or not all(isinstance(each, str) for each in given):
        raise ConfigError(
            f"{name}: {given!r} is not a list of text; write one, such as {json.dumps([example])}"
        )
    return frozenset(each.lower() for each in given)


def flag(options: Options, name: str, *, default: bool = False) -> bool:
    """A bool."""
    given = options.get(name, default)
    if not isinstance(given, bool):
        raise ConfigError(f"{name}: {given!r} is not a bool; write True or False")
    return given


def function(options: Options, name: str) -> Callable[[HttpRequest], Any] | None:
    """A function of a request, where there is one."""
    given = options.get(name)
    return None if given is None else check_called(given, name, ["request"])


def kept_errors(options: Options) -> Collection[int]:
    """The statuses from 400 to 499 whose responses are kept."""
    given, all_of_them = options.get("keep_4xx", False), range(400, 500)
    if isinstance(given, bool):
        return all_of_them if given else ()
    is_some = isinstance(given, Collection) and not isinstance(given, str | bytes)
    if not is_some or not all(each in all_of_them for each in given):
        raise ConfigError(
            f"keep_4xx: {given!r} is not a bool or a list of statuses from 400 to 499; "
            "write True or [402, 409]"
        )
    return frozenset(given)


def kept_by(options: Options) -> tuple[Keep, Restore]:
    """The functions before a response is kept, and after."""
    given = options.get("keep")
    if given is None:
        return _unchanged, _unchanged
    pair = given if isinstance(given, tuple) else (given, _unchanged)
    if len(pair) != 2:
        raise ConfigError(
            "keep: it is a function, or a pair of functions; write keep=(encrypted, decrypted)"
        )
    keep, restore = (check_called(each, "keep", ["answer"]) for each in pair)
    return keep, restore


def _unchanged(answer: HttpAnswer) -> HttpAnswer:
    return answer


def url(options: Options) -> str | None:
    """The URL of the documentation, where there is one."""
    given = options.get("documentation")
    if given is not None and (not isinstance(given, str) or not urlsplit(given).netloc):
        raise ConfigError(
            f'documentation: {given!r} is not a URL; write "https://example.com/docs/idempotency"'
        )
    return given
