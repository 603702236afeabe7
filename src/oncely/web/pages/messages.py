"""Messages: a search over records, and all that is kept of one message."""

import shlex
from dataclasses import replace

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.record import Record
from oncely.web.contents import record_mark
from oncely.web.decisions import RECORDS
from oncely.web.pages.lists import command, more_of
from oncely.web.visit import Visit

_CONTAINS = "contains"
"""How an id is looked for that does not begin with the text."""


def search(visit: Visit) -> Response:
    """The records that fit what was asked for, as far as they are found in a moment; as
    `oncely list --sort id --json` has them.
    """
    found, error = ops.Searched([], 0, None), None
    text, state = visit.query("text"), visit.query("state")
    contains = visit.query("how") == _CONTAINS
    begins, after = None if contains else text, visit.query("after")
    try:
        selection = ops.Selection(
            consumer=visit.consumer,
            states=[state] if state else [],
            older_than=visit.query("older_than"),
            text=text if contains else None,
        )
        found = ops.search(visit.ledger, selection, visit.limit, begins=begins, after=after)
    except ConfigError as wrong:
        error = str(wrong)
    now = visit.ledger.now()
    is_full = found.end is not None and len(found.records) >= visit.limit
    return visit.page(
        "messages.html",
        400 if error else 200,
        records=[
            (ops.word_for(each, now), ops.record_as_dict(each, now)) for each in found.records
        ],
        found=found,
        more_link=more_of(visit, is_full),
        next_link=None if found.end is None else visit.here(after=found.end),
        error=error,
        contains=_CONTAINS,
        states=ops.STATES,
        now=now,
        command=None if error else command(f"list --sort id{_options(visit)}", visit),
    )


def _options(visit: Visit) -> str:
    """What was asked for, as options of the command."""
    asked = {
        "--state": "state",
        "--older-than": "older_than",
        "--id-contains" if visit.query("how") == _CONTAINS else "--id-begins": "text",
        "--after": "after",
    }
    named = {option: visit.query(name) for option, name in asked.items()}
    # In one word: a value may begin with a dash.
    return "".join(f" {shlex.quote(f'{option}={text}')}" for option, text in named.items() if text)


def message(visit: Visit) -> Response:
    """All that is known of one message of one consumer; as `oncely show --story --json` has it."""
    id_, consumer = visit.query("id") or "", visit.consumer
    found = ops.find(visit.ledger, id_, consumer)
    if not found:
        of = "" if consumer is None else f" of consumer {consumer!r}"
        raise RefusedError(f"{id_!r} is not the id of a message{of} in the ledger")
    if len(found) > 1:
        return visit.page(
            "choose.html", message_id=id_, consumers=[record.key.consumer for record in found]
        )
    return _message(visit, found[0])


def _message(visit: Visit, record: Record) -> Response:
    now = visit.ledger.now()
    found = ops.details(visit.ledger, record.key)
    mask = visit.site.mask
    retry = found.retry and replace(found.retry, message=mask(found.retry.message))
    letters = [replace(each, message=mask(each.message)) for each in found.letters]
    seen = found._replace(retry=retry, letters=letters)
    word = ops.word_for(record, now)
    consumer, id_ = map(shlex.quote, record.key)
    return visit.page(
        "message.html",
        record=ops.record_as_dict(record, now) | seen.as_dict(now),
        story=ops.story(visit.ledger, record.key),
        word=word,
        mark=record_mark(record),
        now=now,
        decisions=[each for each in RECORDS.values() if word in each.words],
        command=f"oncely show --story --json --consumer {consumer} -- {id_}",
    )
