"""Logged: a line in the log for each message, without its content."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from oncely._util.event_log import EventLog
from oncely.core.message import Message
from oncely.middleware.chain import Around

_log = EventLog(__name__)

_MESSAGE = "message '%(message_id)s' of type '%(type)s'"
_SENTENCES = {
    "message_handled": f"{_MESSAGE} was handled in %(took_s).3f s",
    "message_failed": f"{_MESSAGE} failed after %(took_s).3f s: %(error)s",
    "message_stopped": f"{_MESSAGE} was stopped after %(took_s).3f s",
}


class Logged(Around):
    """Logs each message at its end: the event `message_handled`, at `level`, or `message_failed`,
    a warning, or `message_stopped` if it was stopped before its end.

    The fields are `message_id`, `type`, `took_s`, `outcome` and the class of an error. Bodies,
    headers and the texts of errors are not logged.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self._level = level

    @contextmanager
    def around(self, message: Message) -> Iterator[None]:  # noqa: D102
        began = time.perf_counter()
        try:
            yield
        except Exception as error:
            _line(logging.WARNING, "failed", message, began, error=type(error).__name__)
            raise
        except BaseException:
            _line(self._level, "stopped", message, began)
            raise
        _line(self._level, "handled", message, began)


def _line(level: int, outcome: str, message: Message, began: float, **details: str) -> None:
    facts = {"message_id": message.id, "type": message.type, "outcome": outcome, **details}
    took_s = time.perf_counter() - began
    event = f"message_{outcome}"
    _log.log(level, _SENTENCES[event], extra={"event": event, **facts, "took_s": took_s})
