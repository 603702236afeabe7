"""Progress on stderr while a command works."""

import sys
import time
from collections.abc import Callable

from oncely.core.shown import shown

_LINE_EVERY_S = 5.0


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
