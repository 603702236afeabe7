"""The `oncely` command: arguments in, exit codes out."""

import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oncely.core.errors import (
    ConfigError,
    ContentionError,
    OncelyError,
    PublishRefused,
    StoreUnavailable,
    TransportError,
    mask_passwords,
    told,
)
from oncely.core.shown import shown

DONE, FAILURES, WRONG, AWAY = range(4)

_EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(("click", "rich", "pydantic"), "cli"),
    **dict.fromkeys(("starlette", "uvicorn"), "web"),
    "jinja2": "report",
    "pyarrow": "archive",
    "pyspark": "spark",
}
"""The packages that commands import, and the extra that brings each."""


@dataclass
class ErrorStyle:
    """How an error of the command is reported; a command with options for that sets it."""

    is_json: bool = False
    verbose: bool | None = None
    """Whether the traceback is printed; None where the command has no --verbose."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0: done; 1: finished with failures; 2: wrong usage or settings;
    3: a server cannot be reached.
    """
    # The commands print themselves what a library would only log.
    logging.getLogger("oncely").addHandler(logging.NullHandler())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An id may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    style = ErrorStyle()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments, style)
        # Now: an error in the flush at Python's exit could not be reported.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OncelyError as error:
        return _say(error, exit_code(error), style)
    except KeyboardInterrupt:
        print("oncely: stopped", file=sys.stderr)
        return FAILURES
    except BrokenPipeError:
        # The reader has closed the pipe, as in `oncely list | head`. Python flushes again at exit.
        _leave_stdout()
        return FAILURES
    except OSError as error:
        # For example, stdout is a file on a full disk.
        _leave_stdout()
        return _say(error, FAILURES, style)


def exit_code(error: OncelyError) -> int:
    """What a command returns that ends with this error."""
    match error:
        case ConfigError():
            return WRONG
        case PublishRefused():
            return FAILURES
        case StoreUnavailable() | ContentionError() | TransportError():
            return AWAY
        case _:
            return FAILURES


def _leave_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: Sequence[str], style: ErrorStyle) -> int:
    try:
        from oncely.cli.commands import run

        return run(arguments, style)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise ConfigError(
            f"{package} is not installed; type: pip install 'oncely[{_EXTRAS[package]}]'"
        ) from error


def _say(error: Exception, code: int, style: ErrorStyle) -> int:
    text = told(error, shown(" ".join(str(error).split())))
    if style.is_json:
        from oncely.cli.logs import told_as_json

        # Then every line on stderr is an object.
        text = told_as_json("command_failed", error=text, exit_code=code)
    else:
        has_more = error.__cause__ is not None and style.verbose is False and code != WRONG
        text = f"oncely: {text}{'; run with --verbose for the traceback' if has_more else ''}"
    print(text, file=sys.stderr)
    if style.verbose:
        # Spark's own text has its tracebacks, if that was noted.
        notes = "\n".join(getattr(error, "__notes__", ()))
        whole = notes or "".join(traceback.format_exception(error))
        lines = map(shown, mask_passwords(whole).splitlines())
        print("\n".join(lines), file=sys.stderr)
    return code
