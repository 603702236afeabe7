"""Records: a search over them, all that is kept of one message; and what operators decide of them,
and of waiting retries.
"""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import Response

from oncely import ops
from oncely.core.errors import ConfigError, RefusedError, StoreError, mask_passwords
from oncely.core.record import Key, Record
from oncely.web.contents import mark, read_mark
from oncely.web.decisions import RECORDS, WAITING, OperatorDecision
from oncely.web.pages.confirming import (
    MORE,
    Chosen,
    DecisionPages,
    Outcome,
    Subject,
    left_of_group,
    named,
    told,
)
from oncely.web.pages.lists import command, more_of
from oncely.web.visit import MOST, Visit

_CONTAINS = "contains"
"""How an id is looked for that does not begin with the text."""
_PROBING_S = 30.0
"""After that no further probe is begun: a browser, or a proxy, does not wait for ever."""
_FASTER = "it has changed since it was shown: a worker or somebody else was faster"


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
        mark=mark(record.key, record.version),
        now=now,
        decisions=[each for each in RECORDS.values() if word in each.words],
        command=f"oncely show --story --json --consumer {consumer} -- {id_}",
    )


# ---- Decisions ---------------------------------------------------------------------------------


def _decide(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that are as they were shown."""
    records, changed_before = _unchanged(visit)
    if decided.needs_probe:
        return _probed(visit, records, changed_before)
    changed = decided.apply(visit.ledger, records, by=visit.by, why=visit.field("why"))
    refused = [*changed_before, *(refusal.reason for refusal in changed.refused)]
    return Outcome(told(changed, named), refused, changed.audit_error)


def _probed(visit: Visit, records: Sequence[Record], left_out: Sequence[str]) -> Outcome:
    """Ask about one after another, while there is time."""
    done: list[tuple[str, str]] = []
    refused = [*left_out]
    audit_error: str | None = None
    until = time.monotonic() + _PROBING_S
    for record in records:
        changed, said = None, "not asked, as the others took too long: choose it again"
        if time.monotonic() <= until:
            changed, said = _probed_one(visit, record)
        is_decided = changed is not None and changed.done
        if is_decided:
            done.append((named(record.key), said))
        else:
            refused.append(f"{named(record.key)}: {said}")
        if changed is not None:
            audit_error = audit_error or changed.audit_error
    return Outcome(done, refused, audit_error)


def _probed_one(visit: Visit, record: Record) -> tuple[ops.Changed[Key] | None, str]:
    """What a probe has changed, and what came of it in words."""
    probe = visit.site.probes.get(record.key.consumer)
    if probe is None:
        return None, "its consumer has no probe here"
    try:
        found = ops.probe(visit.ledger, record, probe, by=visit.by, why=visit.field("why"))
    except (RefusedError, StoreError) as error:
        # Others may be decided already: the page has to name them.
        return None, mask_passwords(str(error))
    said = found.finding.replace("_", " ")
    reasons = [found.error or "", *(refusal.reason for refusal in found.changed.refused)]
    reasons += found.changed.next_steps.values()
    lines = [reason.splitlines()[0] for reason in reasons if reason]
    return found.changed, ": ".join([said, *lines])


def _choose(visit: Visit) -> Chosen:
    if visit.sent("every"):
        # All in doubt, of the list that was shown.
        consumer = visit.field("consumer") or None
        selection = ops.Selection(consumer=consumer, states=[ops.IN_DOUBT])
        records, more = ops.select(visit.ledger, selection, MOST)
        left_out = [MORE] if more else []
    else:
        records, left_out = _unchanged(visit)
    now = visit.ledger.now()
    subjects = [
        Subject(
            each.key, mark(each.key, each.version), f"{named(each.key)}: {ops.word_for(each, now)}"
        )
        for each in records
    ]
    return Chosen(subjects, left_out)


def _unchanged(visit: Visit) -> tuple[Sequence[Record], list[str]]:
    """The named records that are as they were shown, and what to say of the others."""
    shown = _shown(visit)
    found = visit.ledger.find_many(shown)
    unchanged = {key: each for key, each in found.items() if each.version == shown[key]}
    return (
        [unchanged[key] for key in shown if key in unchanged],
        [f"{named(key)}: {_FASTER}" for key in shown if key not in unchanged],
    )


RECORD_PAGES = DecisionPages(RECORDS, "/records/change", "/in-doubt", "record", _choose, _decide)


def _shown(visit: Visit) -> dict[Key, int]:
    """What the form names, and the versions."""
    return dict(map(read_mark, visit.sent("record")[:MOST]))


def _choose_retries(visit: Visit) -> Chosen:
    """Those that were ticked, those of a group, or all that wait."""
    consumer, keys = visit.field("consumer") or None, [*_shown(visit)]
    left_out: Sequence[str] = []
    if visit.sent("every"):
        found, more = ops.waiting(visit.ledger, consumer, MOST, with_bodies=False)
        keys, left_out = [each.key for each in found], [MORE] if more else []
    elif visit.field("group"):
        group = ops.waiting_groups(visit.ledger, consumer).only(visit.field("group"))
        keys, left_out = [*group.groups[0].ids[:MOST]], left_of_group(group)
    return Chosen([Subject(key, mark(key), named(key)) for key in keys], left_out)


def _decide_retries(visit: Visit, decided: OperatorDecision) -> Outcome:
    """Do it to those that wait still, and that no worker has taken."""
    changed = decided.apply(visit.ledger, [*_shown(visit)], by=visit.by, why=visit.field("why"))
    refused = [each.reason for each in changed.refused]
    return Outcome(told(changed, named), refused, changed.audit_error)


RETRY_PAGES = DecisionPages(
    WAITING, "/waiting/change", "/waiting", "record", _choose_retries, _decide_retries
)
