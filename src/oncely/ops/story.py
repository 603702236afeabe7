"""All that is known of one message, in the order of time."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from oncely.core.activity import AuditEntry
from oncely.core.errors import mask_passwords
from oncely.core.errors_by_kind import headline
from oncely.core.record import Key, Record
from oncely.core.shown import moment
from oncely.core.state_words import EXHAUSTED
from oncely.core.waiting import OUTBOX
from oncely.ledger.ledger import Ledger
from oncely.ops.letters import LETTERS_DISCARDED
from oncely.ops.records import word_for

_PAGE = 500
_LOOKED_AT = 5_000
"""Entries of the audit, the newest, among which those of the message are looked for."""
_JUST_BEFORE_S = 10.0
_DEAD_LETTER = "dead letter"
_NOTES = {
    "reset": "retried",
    "happened": "settled_happened",
    "discarded": "discarded",
    "worker_dead": "worker_dead",
}
"""The notes in metadata, and the words for them."""


class Chapter(NamedTuple):
    """Something that is known of a message."""

    at: float | None
    """Seconds since 1970; None where the time is not kept."""
    what: str
    """first seen, step, waits to be sent, waits for its retry, dead letter, last seen, or
    what a person has changed, as the audit has it.
    """
    details: Mapping[str, Any]

    def in_words(self, now: float) -> str:
        """The details for people, on one line; empty where there are none."""
        return _in_words(self.details, now)


class Story(NamedTuple):
    """All that is known of one message of a consumer."""

    record: Record | None
    chapters: Sequence[Chapter]
    """In the order of time; those without one stand before what comes after them."""
    audit_is_whole: bool
    """Whether all of the audit was looked at; else only its newest entries."""

    def as_dict(self) -> dict[str, Any]:
        """The story as JSON has it."""
        return {
            "story": [{"at": at, "what": what, **details} for at, what, details in self.chapters],
            "audit_is_whole": self.audit_is_whole,
        }


def _in_words(details: Mapping[str, Any], now: float) -> str:
    told = ((name, _told(name, value, now)) for name, value in details.items())
    return ", ".join(f"{name.removeprefix('is_')} {text}" for name, text in told if text)


def _told(name: str, value: Any, now: float) -> str:
    """A value in words; empty where it says nothing."""
    match value:
        case None if name in ("changed", "refused"):
            return "not known"
        case None | "":
            return ""
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return f"({_in_words(value, now)})"
        case int() | float() if name == "due":
            return moment(value, now)
        case str() if name == "error":
            return headline(value)
        case _:
            return str(value)


def story(ledger: Ledger, key: Key) -> Story:
    """What the ledger knows of a message: its record, its steps, what waits of it, and what people
    have changed: as the record has it, and as the newest entries of the audit have it. Of several
    messages that were changed together the audit names the first alone.
    """
    now, record = ledger.now(), ledger.find(key)
    waiting = [*_of_waiting(ledger, key)]
    entries: list[AuditEntry] = []
    is_whole, before = False, None
    while not is_whole and len(entries) < _LOOKED_AT:
        page = ledger.operations.audit(_PAGE, before)
        entries += page
        is_whole = len(page) < _PAGE
        before = page[-1].id if page else None
    audited = [
        Chapter(entry.at, _action(entry), _facts(entry))
        for entry in entries
        if Key(entry.consumer, entry.message_id) == key
    ]
    timed = [*_of_record(record, now, audited), *waiting, *audited]
    has_letter = any(each.what == _DEAD_LETTER for each in waiting)
    if record is not None and word_for(record, now) == EXHAUSTED and not has_letter:
        timed += _perhaps_discarded(entries, record)
    chapters = sorted(timed, key=lambda chapter: chapter.at or 0.0)
    steps = [Chapter(None, "step", {"name": name}) for name in ledger.steps(key)]
    index = next((n for n, each in enumerate(chapters) if each.what == "last seen"), len(chapters))
    return Story(record, [*chapters[:index], *steps, *chapters[index:]], is_whole)


def _of_record(record: Record | None, now: float, audited: Sequence[Chapter]) -> Iterator[Chapter]:
    if record is None:
        return
    yield Chapter(record.first_seen, "first seen", {})
    facts = {"attempts": record.attempts, "fence": record.fence, "duplicates": record.duplicates}
    error = None if record.error is None else mask_passwords(record.error)
    state = {"state": word_for(record, now), "error": error}
    notes = {name: note for name in _NOTES if (note := (record.metadata or {}).get(name))}
    at = {name: time for name, note in notes.items() if (time := _time_of(note)) is not None}
    for name, time in at.items():
        said = {each: notes[name].get(each) for each in ("by", "why")}
        # An entry of the audit is about the decision that was noted then if it was written just
        # before.
        if not any(
            -_JUST_BEFORE_S < (entry.at or 0.0) - time < 1.0
            and all(entry.details[each] == said[each] for each in said)
            for entry in audited
        ):
            # The note's time is cut to seconds: it was made within that one.
            at_most = min(time + 0.999, record.last_seen)
            yield Chapter(max(time, at_most), _NOTES[name], said)
    untimed = {name: note for name, note in notes.items() if name not in at}
    yield Chapter(record.last_seen, "last seen", {**state, **facts, **untimed})


def _time_of(note: Any) -> float | None:
    """When the decision that is noted was made; None for metadata of the user's own."""
    try:
        return datetime.fromisoformat(note["at"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _of_waiting(ledger: Ledger, key: Key) -> Iterator[Chapter]:
    for message in ledger.mailbox.of(key):
        error = message.reason or message.error
        facts: dict[str, Any] = {"id": message.number, "attempts": message.attempts}
        if not message.is_set_aside:
            facts["due"] = message.due
        facts["error"] = None if error is None else mask_passwords(error)
        if message.queue == OUTBOX:
            facts |= {"destination": message.destination, "is_refused": message.is_set_aside}
            yield Chapter(message.since, "waits to be sent", facts)
        elif message.is_set_aside:
            # It came to be when its last attempt failed, not when the message first came.
            yield Chapter(message.last_seen, _DEAD_LETTER, facts)
        else:
            yield Chapter(message.since, "waits for its retry", facts)


def _perhaps_discarded(entries: Iterable[AuditEntry], record: Record) -> Iterator[Chapter]:
    """The entries of several letters that were discarded together since the message came: other
    decisions about many are noted in each record, but this one leaves the records as they are.
    """
    key = record.key
    for entry in entries:
        is_ours = entry.consumer in ("", key.consumer) and entry.at >= record.first_seen
        is_several = (entry.chosen or 0) > 1 and (entry.consumer, entry.message_id) != key
        if entry.action == LETTERS_DISCARDED and is_ours and is_several:
            perhaps = (
                f"this message was one of {entry.chosen:,}; only the first, {entry.message_id!r}, "
                "is named"
            )
            yield Chapter(entry.at, entry.action, {"perhaps": perhaps, **_facts(entry)})


def _action(entry: AuditEntry) -> str:
    is_refused = bool(entry.refused) and not entry.changed
    return f"{entry.action}: refused" if is_refused else entry.action


def _facts(entry: AuditEntry) -> Mapping[str, Any]:
    counts = {"chosen": entry.chosen, "changed": entry.changed, "refused": entry.refused}
    return {"by": entry.by, "why": entry.why, **counts}
