"""The `oncely` command: arguments in, exit codes out."""

import argparse
import io
import logging
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence

from oncely.cli.arguments import parse
from oncely.cli.logs import told_as_json
from oncely.core.errors import ConfigError, OncelyError, mask_passwords
from oncely.core.shown import shown

DONE, FAILURES, WRONG = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0: done; 1: finished with failures; 2: wrong usage or settings."""
    # The commands print themselves what a library would only log.
    logging.getLogger("oncely").addHandler(logging.NullHandler())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # An id may have characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    parsed = None
    try:
        parsed = parse(arguments)
        code = _run(parsed)
        # Now: an error in the flush at Python's exit could not be reported.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except ConfigError as error:
        return _say(error, WRONG, parsed)
    except OncelyError as error:
        return _say(error, FAILURES, parsed)
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
        return _say(error, FAILURES, parsed)


def _leave_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(parsed: argparse.Namespace) -> int:
    try:
        run = pkgutil.resolve_name(parsed.run)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; type: pip install 'oncely[{parsed.extra}]'"
        ) from error
    return int(run(parsed))


def _say(error: Exception, code: int, parsed: argparse.Namespace | None) -> int:
    text = mask_passwords(shown(" ".join(str(error).split())))
    if getattr(parsed, "log_format", None) == "json":
        # Then every line on stderr is an object.
        text = told_as_json("command_failed", error=text, exit_code=code)
    else:
        text = f"oncely: {text}{_where_more_is(error, code, parsed)}"
    print(text, file=sys.stderr)
    if getattr(parsed, "verbose", False):
        print(mask_passwords(_whole(error)), file=sys.stderr)
    return code


def _where_more_is(error: Exception, code: int, parsed: argparse.Namespace | None) -> str:
    has_more = error.__cause__ is not None and getattr(parsed, "verbose", None) is False
    return "; run with --verbose for the traceback" if has_more and code == FAILURES else ""


def _whole(error: Exception) -> str:
    """The traceback; or Spark's own text with its tracebacks, if that was noted."""
    notes = getattr(error, "__notes__", ())
    return "\n".join(notes) or "".join(traceback.format_exception(error))
