"""Failures of handlers, as they are logged wherever handlers run."""

from collections.abc import Mapping
from typing import Any

from oncely._util.event_log import EventLog

_RETRIED = (
    "the handler of message '%(message_id)s' failed: %(reason)s; it is tried again in "
    "%(next_try_in_s)g s"
)
_LEFT = "the handler of message '%(message_id)s' failed: %(reason)s; it is not tried again"


def log_failure(log: EventLog, error: BaseException | None, values: Mapping[str, Any]) -> None:
    """Log that a handler has raised `error`, and whether its message is tried again."""
    sentence = _LEFT if values["next_try_in_s"] is None else _RETRIED
    extra = {"event": "handler_failed", **values}
    log.warning(sentence, exc_info=error, extra=extra, stacklevel=2)
