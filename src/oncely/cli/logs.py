"""The log of a long-running command: on stderr, a line or a JSON object for each event."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from oncely.cli.options import RunOptions
from oncely.core.errors import NAMES, is_secret, mask_passwords
from oncely.core.shown import shown

_ORDINARY = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of every log record; all others are its `extra` fields."""
_IN_TEXT = ("event", "worker", "pid")
"""The fields that a line of text has: what else matters is in its sentence."""

Write = Callable[[str], object]


@contextmanager
def logged(
    running: RunOptions, write: Write | None = None, worker: int | None = None
) -> Iterator[None]:
    """Log as --log-level and --log-format say, on stderr or by `write`, which takes whole lines;
    each line has the number of the worker, if this is one.
    """
    logger = logging.getLogger("oncely")
    fixed = {} if worker is None else {"worker": worker, "pid": os.getpid()}
    handler = _LineHandler(write or write_line)
    handler.setFormatter(_EventFormatter(running.log_format, fixed))
    former = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(running.log_level.upper())
    # The log that the user's module has set up would print each event once more.
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = former


def write_line(line: str) -> None:
    """Write on stderr, in one piece."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def told_as_json(event: str, *, error: str, **details: object) -> str:
    """An error as a line of the JSON log."""
    fields = {"event": event, "error": error, **details}
    record = logging.makeLogRecord({"msg": error, "levelname": "ERROR", **fields})
    return _EventFormatter("json", {}).format(record)


class _LineHandler(logging.Handler):
    """Hands each record over as text."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record))
        except Exception:  # noqa: BLE001 - logging's own way: a full disk stops no message.
            self.handleError(record)


class _EventFormatter(logging.Formatter):
    """Formats a record as a line of text or as JSON, passwords masked; each has the `fixed` fields,
    too.
    """

    def __init__(self, log_format: str, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self._is_json = log_format == "json"
        self._fixed = fixed

    def format(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in _ORDINARY}
        details = {name: _masked(name, value) for name, value in {**self._fixed, **extra}.items()}
        trace = None
        if record.exc_info and record.exc_info[1] is not None:
            trace = mask_passwords(self.formatException(record.exc_info))
        said = record.getMessage()
        if "event" not in extra:
            said = mask_passwords(said)  # Of an event, it is masked but for the message's name.
        when = datetime.fromtimestamp(record.created, UTC)
        moment = f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03}Z"
        if self._is_json:
            # Time, level, event, message, the event's fields, and `exception`.
            told = {
                "time": moment,
                "level": record.levelname.lower(),
                "event": details.get("event"),
                "message": said,
            }
            last = {} if trace is None else {"exception": trace}
            # A field with one of these names does not replace it.
            return json.dumps({**told, **details, **told, **last})
        # One line: time, level, sentence and event; a traceback below, indented.
        names = [f"{name}={shown(str(details[name]))}" for name in _IN_TEXT if name in details]
        line = " ".join([moment, f"{record.levelname:<7}", shown(said), *names])
        return "\n".join([line, *(f"  {shown(each)}" for each in (trace or "").splitlines())])


def _masked(name: str, value: object) -> Any:
    """A field as a JSON value."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _masked(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked(name, each) for each in value]
    if name in NAMES:
        return str(value)
    return "***" if is_secret(name) else mask_passwords(str(value))
