"""Failed: dead letters, a list of them and one opened."""

import json
from dataclasses import replace

from starlette.responses import Response, StreamingResponse

from oncely import ops
from oncely.core.shown import shown
from oncely.core.waiting import DeadLetter
from oncely.web import contents
from oncely.web.decisions import LETTERS
from oncely.web.pages.lists import listed
from oncely.web.visit import Visit

_EDITABLE = 100_000
"""Characters of a body that a form is filled with."""


def letters(visit: Visit) -> Response:
    """The dead letters of a consumer, or of all."""
    return listed(visit, "failed", "Failed", contents.failed, LETTERS.values(), "dead list")


def export(visit: Visit) -> Response:
    """All dead letters, or those of a consumer or a group, as people may see them: a JSON object a
    line, as `oncely dead export` has them.
    """
    letters = ops.letters_to_export(visit.ledger, visit.consumer, visit.query("group"))
    lines = (f"{json.dumps(masked(visit, each))}\n" for each in letters)
    name = 'attachment; filename="dead-letters.jsonl"'
    kind = "application/x-ndjson"
    return StreamingResponse(lines, media_type=kind, headers={"content-disposition": name})


def letter(visit: Visit) -> Response:
    """One in full; as `oncely dead show --json` has it."""
    found = ops.letter(visit.ledger, number(visit.query("id") or ""))
    shown_as = masked(visit, found)
    return visit.page(
        "letter.html",
        letter=shown_as,
        editable=_editable(found, shown_as["body"]),
        has_record=bool(found.key.message_id),
        now=visit.ledger.now(),
        decisions=LETTERS.values(),
        command=f"oncely dead show {found.id} --json",
    )


def number(text: str) -> int:
    """The number of a dead letter; one that none has for what is not a number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def masked(visit: Visit, letter: DeadLetter) -> dict[str, object]:
    """A dead letter with all that people may see of it."""
    seen = replace(letter, message=visit.site.mask(letter.message))
    return ops.letter_as_dict(seen, is_whole=True)


def _editable(letter: DeadLetter, seen: object) -> str | None:
    """The body for a form to begin with; None where people do not see it as it is, or a form
    cannot hold it: what is sent back would be another.
    """
    try:
        body = letter.message.body.decode()
    except UnicodeDecodeError:
        return None
    lines = body.replace("\r\n", "\n").replace("\t", " ").split("\n")
    holds = len(body) <= _EDITABLE and all(shown(line) == line for line in lines)
    return body if body == seen and holds else None
