"""Failures of handlers, as they are logged wherever handlers run."""

from collections.abc import Mapping
from typing import Any

from oncely._util.event_log import EventLog
from oncely.core.verdicts import Counted, DeadLetter, Delay, Ending

_FAILED = "the handler of message '%(message_id)s' failed: %(reason)s; "
_RETRIED = _FAILED + "it is tried again in %(next_try_in_s)g s"
_DEAD = _FAILED + "it becomes a dead letter"
_LEFT = _FAILED + "it is not tried again"
_UNKNOWN = "message '%(message_id)s' is in doubt, since its handler failed: %(reason)s"


def log_failure(
    log: EventLog, error: BaseException | None, ending: Ending | None, values: Mapping[str, Any]
) -> None:
    """Log that a handler has raised `error`, and what becomes of its message."""
    verdict = None if ending is None else ending.verdict
    delay_s = verdict.delay_s if isinstance(verdict, Delay) else None
    left = _DEAD if isinstance(verdict, DeadLetter) else _LEFT
    extra = {"event": "handler_failed", **values, "next_try_in_s": delay_s}
    if ending is not None and ending.counted is Counted.IN_DOUBT:
        doubt = {**extra, "event": "effect_unknown"}
        log.warning(_UNKNOWN, exc_info=error, extra=doubt, stacklevel=2)
        return
    log.warning(left if delay_s is None else _RETRIED, exc_info=error, extra=extra, stacklevel=2)
