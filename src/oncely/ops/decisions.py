"""What people decide about records: to run again, to be done, to be forgotten."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

from oncely._util.event_log import EventLog
from oncely.core.record import Key, Record, check_keys
from oncely.ledger.ledger import Ledger
from oncely.ops.auditing import Note, Noted, about, audited, change_each

_log = EventLog(__name__)

_SENTENCES = {
    "reset": "%(by)s has reset message '%(message_id)s' of '%(consumer)s', which may run again",
    "happened": "%(by)s has completed message '%(message_id)s' of '%(consumer)s'",
    "forgotten": "%(by)s has removed the record of message '%(message_id)s' of '%(consumer)s'",
    "run_now": "%(by)s has message '%(message_id)s' of '%(consumer)s' tried again at once",
    "cancelled": "%(by)s has made message '%(message_id)s' of '%(consumer)s' a dead letter",
}


class OperatorRefusal(NamedTuple):
    """A record that was left as it is."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of the records that were to be changed."""

    done: Sequence[Key]
    refused: Sequence[OperatorRefusal]
    by: str
    why: str
    """Who and why, as they were noted: cut, and with passwords masked."""
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""


def reset(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed:
    """Allow each to run again; who did it, when and why is kept with the record, logged, and in the
    audit.
    """
    return _change(
        ledger, records, "reset", lambda each, note: ledger.reset(each.key, **note), noted
    )


def happened(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed:
    """Complete each that is in doubt, as somebody knows that its effect has happened: nothing of it
    runs again. Noted as by `reset`.

    A record that was claimed again since it was found is refused: of that claim nobody has said
    anything.
    """

    def confirm(record: Record, note: Mapping[str, Any]) -> None:
        ledger.happened(record.key, fence=record.fence, **note)

    return _change(ledger, records, "happened", confirm, noted)


def not_happened(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed:
    """As `happened`, of effects that have not: each is reset, and runs again."""

    def allow(record: Record, note: Mapping[str, Any]) -> None:
        ledger.reset(record.key, fence=record.fence, **note)

    return _change(ledger, records, "reset", allow, noted)


def forget(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed:
    """Remove each that is still as it was found; who did it and why is logged, and in the audit.

    A record that has changed is refused: what was failed when it was chosen may be completed by
    now, and forgotten it would run again.
    """

    def forget_unchanged(record: Record, _: Mapping[str, Any]) -> None:
        ledger.forget(record.key, found=record)

    return _change(ledger, records, "forgotten", forget_unchanged, noted)


def _change(
    ledger: Ledger,
    records: Sequence[Record],
    event: str,
    change: Callable[[Record, Mapping[str, Any]], None],
    noted: Noted,
) -> Changed:
    found = {record.key: record for record in records}
    return change_keys(ledger, [*found], event, lambda key, note: change(found[key], note), **noted)


def change_keys(
    ledger: Ledger,
    keys: Sequence[Key],
    event: str,
    change: Callable[[Key, Mapping[str, Any]], None],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> Changed:
    """Note the action in the audit; change one after another; log those that were not refused.
    Raises as `change_each` does.
    """
    note = Note.of(by, why)
    if not keys:
        return Changed([], [], *note)
    check_keys(keys)

    def change_one(key: Key) -> None:
        change(key, note._asdict())
        _log.info(_SENTENCES[event], extra={"event": event, **key._asdict(), **note._asdict()})

    with audited(ledger, event, note, about(keys), len(keys)) as tally:
        done, refused = change_each(keys, change_one, tally, on_each)
    return Changed(done, [OperatorRefusal(*each) for each in refused], *note, tally.audit_error)
