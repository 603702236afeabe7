"""Logged: a line in the log for each message, without its content."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oncely.core.message import Message
from oncely.middleware.chain import Around

_log = logging.getLogger(__name__)


class Logged(Around):
    """Logs each message at its end: `message_handled`, at `level`, or `message_failed`, a warning,
    or `message_stopped` if it was stopped before its end.

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
            details = {"outcome": "failed", "error": type(error).__name__}
            _line(logging.WARNING, "message_failed", message, began, details)
            raise
        except BaseException:
            _line(self._level, "message_stopped", message, began, {"outcome": "stopped"})
            raise
        _line(self._level, "message_handled", message, began, {"outcome": "handled"})


def _line(level: int, event: str, message: Message, began: float, details: Any) -> None:
    took_s = time.perf_counter() - began
    names = {"message_id": message.id, "type": message.type, "took_s": took_s}
    _log.log(level, event, extra=names | details)
