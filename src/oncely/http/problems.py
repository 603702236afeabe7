"""Problems: the response if a request does not run, as RFC 9457 problem details or otherwise."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oncely.core.errors import (
    BusyError,
    ContentionError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MismatchError,
    StoreUnavailable,
)
from oncely.http.answers import HttpAnswer

_RETRY_S = 1
"""Seconds after which a request that could not run may run."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request does not run, or why its response cannot be replayed."""

    name: str
    """The end of the problem's type."""
    status: int
    code: str
    """The problem's code in the Agentic Commerce Protocol, if it has one."""
    title: str
    detail: str
    retry_s: int | None = None
    """Seconds after which the client may repeat the request; None if that would not help."""
    documentation: str | None = None
    """The URL where the API documents its idempotency keys."""


Errors = Callable[[Problem], HttpAnswer]
"""Makes the response for a problem."""


def problem_json(problem: Problem) -> HttpAnswer:
    """The problem as application/problem+json (RFC 9457)."""
    documentation = problem.documentation
    base = "urn:oncely:problem:" if documentation is None else f"{documentation}#"
    content = {
        "type": f"{base}{problem.name}",
        "title": problem.title,
        "status": problem.status,
        "detail": problem.detail,
        "code": problem.code,
    }
    return _answer(problem, "application/problem+json", content)


def acp_json(problem: Problem) -> HttpAnswer:
    """The problem as the Agentic Commerce Protocol's flat error."""
    is_ours = problem.status >= 500
    content = {
        "type": "service_unavailable" if is_ours else "invalid_request",
        "code": problem.code,
        "message": f"{problem.title}: {problem.detail}",
    }
    return _answer(problem, "application/json", content)


def _answer(problem: Problem, content_type: str, content: Mapping[str, Any]) -> HttpAnswer:
    body = json.dumps(content).encode()
    fields = [
        ("Content-Type", content_type),
        ("Content-Language", "en"),
        ("Content-Length", str(len(body))),
        ("Cache-Control", "no-store"),
    ]
    if problem.retry_s is not None:
        fields.append(("Retry-After", str(problem.retry_s)))
    if problem.documentation is not None:
        fields.append(("Link", f'<{problem.documentation}>; rel="describedby"; type="text/html"'))
    return HttpAnswer(problem.status, fields, body)


KEY_MISSING = Problem(
    "key-missing",
    400,
    "idempotency_key_required",
    "Idempotency-Key is missing",
    "this operation needs an Idempotency-Key header field: send a new key, such as a UUID, "
    "with each new operation, and the same key when you repeat it",
)
IN_FLIGHT = Problem(
    "in-flight",
    409,
    "idempotency_in_flight",
    "A request is outstanding for this Idempotency-Key",
    "a request with the same Idempotency-Key is being processed: repeat this one later",
    retry_s=_RETRY_S,
)
KEY_REUSED = Problem(
    "key-reused",
    422,
    "idempotency_conflict",
    "Idempotency-Key is already used",
    "another request was made under this Idempotency-Key: send a new key with a new request",
)
IN_DOUBT = Problem(
    "in-doubt",
    409,
    "idempotency_in_doubt",
    "The first request under this Idempotency-Key is in doubt",
    "it is not known whether it had its effect: it does not run again until that is decided",
)
FAILED_PERMANENTLY = Problem(
    "failed",
    409,
    "idempotency_failed",
    "The request has failed before",
    "it does not run again: send a new key with a new request",
)
UNAVAILABLE = Problem(
    "unavailable",
    503,
    "idempotency_unavailable",
    "Idempotency cannot be ensured at the moment",
    "nothing was done: repeat the request later",
    retry_s=_RETRY_S,
)


SCOPE_MISSING = Problem(
    "misconfigured",
    500,
    "idempotency_misconfigured",
    "Idempotency cannot be ensured for this request",
    "the application does not say whose request it is: nothing was done",
)
NOT_AUTHORIZED = Problem(
    "not-authorized",
    403,
    "idempotency_not_authorized",
    "The request is not authorized",
    "its sender may not make it: nothing was done",
)
INCOMPLETE = Problem(
    "incomplete",
    400,
    "idempotency_incomplete",
    "The request's body is incomplete",
    "nothing was done: repeat the request as a whole",
)
LENGTH_REQUIRED = Problem(
    "length-required",
    411,
    "idempotency_length_required",
    "The request's body has no length",
    "nothing was done: this server does not tell whether it is whole; send Content-Length",
)


def too_large(limit: int) -> Problem:
    """The body is larger than requests with keys may be."""
    return Problem(
        "too-large",
        413,
        "idempotency_too_large",
        "The request's body is too large",
        f"a request with an Idempotency-Key has at most {limit:,} bytes: nothing was done",
    )


def problem_of(error: Exception, *, has_run: bool) -> Problem | None:
    """The problem of a request that is not granted, or whose end the ledger does not know; None for
    other errors.
    """
    match error:
        case BusyError() | FencedError():
            return IN_FLIGHT
        case MismatchError():
            return KEY_REUSED
        case InDoubtError():
            return IN_DOUBT
        case ExhaustedError():
            return FAILED_PERMANENTLY
        case StoreUnavailable() | ContentionError():
            return IN_DOUBT if has_run else UNAVAILABLE
    return None


class Refused(Exception):
    """A request that does not run, since there is a `problem` with it."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.title)
        self.problem = problem


def key_unusable(reason: str) -> Problem:
    """The key is not usable."""
    return Problem(
        "key-unusable", 400, "idempotency_key_invalid", "Idempotency-Key cannot be used", reason
    )


def answer_not_kept(reason: str) -> Problem:
    """The first request is done, and its response cannot be replayed."""
    return Problem(
        "answer-not-kept",
        409,
        "idempotency_answer_not_kept",
        "The request was processed before",
        f"it does not run again, and its answer was not kept: {reason}",
    )
