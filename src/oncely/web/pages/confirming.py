"""The page that says first what a decision would do, and the one that says what it did."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from oncely.core.record import Key
from oncely.web.decisions import OperatorDecision, needs_note
from oncely.web.visit import MOST, Visit

MORE = f"all after the first {MOST:,}: decide again for the rest"
"""What is left out, where more are meant than can be decided at once."""
NOTE_MISSING = "Write why: the note is kept with the change."


class Subject(NamedTuple):
    """A record or dead letter of which something is decided."""

    key: Key
    value: str
    """By which the form names it."""
    label: str


class Outcome(NamedTuple):
    """What a decision came to."""

    done: list[str]
    refused: list[str]
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""


def confirm_page(
    visit: Visit,
    decided: OperatorDecision,
    subjects: Sequence[Subject],
    paths: tuple[str, str],
    *,
    left_out: Sequence[str] = (),
    error: str | None = None,
) -> Response:
    """Ask whether that is meant, and why; `places` are where it is done, and where it is left."""
    return visit.page(
        "confirm.html",
        400 if error else 200,
        decided=decided,
        subjects=subjects,
        counts=Counter(each.key.consumer for each in subjects),
        left_out=left_out,
        needs_note=needs_note(decided, len(subjects)),
        to=paths[0],
        back=paths[1],
        error=error,
    )


def lacks_note(visit: Visit, decided: OperatorDecision, count: int) -> str | None:
    """What to say to whoever has not said why, and has to."""
    missing = needs_note(decided, count) and not visit.field("why").strip()
    return NOTE_MISSING if missing else None


def done_page(visit: Visit, decided: OperatorDecision, outcome: Outcome, back: str) -> Response:
    """Say what has become of each."""
    return visit.page("done.html", decided=decided, outcome=outcome, back=back)
