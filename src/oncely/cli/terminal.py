"""What commands say and ask beside their tables: JSON on stdout; lines, questions and progress on
stderr.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from oncely.core.errors import ConfigError, RefusedError
from oncely.core.shown import shown

if TYPE_CHECKING:
    from oncely.ops import Changed

_LINE_EVERY_S = 5.0


def put_json(found: object) -> None:
    """The answer of a command with --json, in one line on stdout."""
    print(json.dumps(found))


def say(text: str) -> None:
    """A line on stderr: stdout may be read by a program."""
    print(shown(text), file=sys.stderr, flush=True)


def tell_audit(error: str | None) -> None:
    """Say where the counts of a change are not in the audit."""
    if error is not None:
        say(f"oncely: done, but the audit does not say how many were changed: {error}")


def tell_changed(changed: "Changed[int]", done: str, what: str, *, as_json: bool) -> None:
    """Report a change of messages that were named by their numbers; `what` is the word for one.
    Raises RefusedError where some are not there.
    """
    if as_json:
        put_json(
            {
                done.replace(" ", "_"): changed.done,
                "missing": changed.missing,
                "by": changed.by,
                "why": changed.why,
                "audit_error": changed.audit_error,
            }
        )
    else:
        print(f"{done}: {len(changed.done):,}")
    tell_audit(changed.audit_error)
    if changed.missing:
        raise RefusedError(f"there is no {what} {', '.join(map(str, changed.missing))}")


def agreed(what: str) -> bool:
    """Ask at the terminal whether to do that. Raises ConfigError if stdin is not a terminal."""
    what = shown(what)
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}? not a terminal: add --yes to confirm")
    print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in {"y", "yes"}:
        return True
    say("nothing was changed")
    return False


class Progress:
    """One line that changes in place on a terminal; elsewhere a line now and then.

    `first`, if given, is shown at once. If `is_quiet`, nothing is shown: each line on stderr is
    for a program.
    """

    def __init__(self, first: str = "", *, is_quiet: bool = False) -> None:
        from rich.console import Console

        self._first = first
        self._is_quiet = is_quiet
        self._console = Console(stderr=True)
        self._began = self._said_at = time.monotonic()
        self._status = self._console.status(first)

    def __enter__(self) -> "Progress":
        if self._is_quiet:
            return self
        if self._console.is_terminal:
            self._status.start()
        elif self._first:
            print(self._first, file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @property
    def took_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def show(self, text: str) -> None:
        """Show where the work stands."""
        from rich.text import Text

        now = time.monotonic()
        if self._is_quiet:
            return
        if self._console.is_terminal:
            # As text: a consumer's name is not markup.
            self._status.update(Text(shown(text)))
        elif now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            print(shown(text), file=sys.stderr, flush=True)

    def counter(self, total: int) -> Callable[[int], None]:
        """A function that shows how many of `total` are done."""
        return lambda done: self.show(f"{done:,} of {total:,}")
