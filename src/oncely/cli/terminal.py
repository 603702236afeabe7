"""What commands say and ask beside their tables: JSON on stdout, lines and questions on stderr."""

import json
import sys
from typing import TYPE_CHECKING

from oncely.core.errors import ConfigError, RefusedError
from oncely.core.shown import shown

if TYPE_CHECKING:
    from oncely.ops import LettersChanged


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


def tell_changed(changed: "LettersChanged", done: str, what: str, *, as_json: bool) -> None:
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
