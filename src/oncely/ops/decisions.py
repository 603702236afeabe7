"""What people decide about records: to run again, to be done, to be forgotten."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oncely._util.event_log import EventLog
from oncely.core.errors import RefusedError, StoreError
from oncely.core.record import Key, Record, check_keys
from oncely.ledger import Ledger
from oncely.ops.auditing import Note, OnEach, about, audited, cut_short

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


def reset(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: OnEach = lambda _: None,
) -> Changed:
    """Allow each to run again; who did it, when and why is kept with the record, logged, and in the
    audit. `on_each` is told how many have had their turn.
    """

    def reset_one(record: Record, note: Note) -> None:
        ledger.reset(record.key, by=note.by, why=note.why)

    return _change(ledger, records, "reset", Note.of(by, why), reset_one, on_each)


def happened(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: OnEach = lambda _: None,
) -> Changed:
    """Complete each that is in doubt, as somebody knows that its effect has happened: nothing of it
    runs again. Noted as by `reset`.

    A record that was claimed again since it was found is refused: of that claim nobody has said
    anything. `on_each` is told how many have had their turn.
    """

    def confirm(record: Record, note: Note) -> None:
        ledger.happened(record.key, by=note.by, why=note.why, fence=record.fence)

    return _change(ledger, records, "happened", Note.of(by, why), confirm, on_each)


def not_happened(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: OnEach = lambda _: None,
) -> Changed:
    """As `happened`, of effects that have not: each is reset, and runs again."""

    def allow(record: Record, note: Note) -> None:
        ledger.reset(record.key, by=note.by, why=note.why, fence=record.fence)

    return _change(ledger, records, "reset", Note.of(by, why), allow, on_each)


def forget(
    ledger: Ledger,
    records: Sequence[Record],
    *,
    by: str,
    why: str = "",
    on_each: OnEach = lambda _: None,
) -> Changed:
    """Remove each that is still as it was found; who did it and why is logged, and in the audit.

    A record that has changed is refused: what was failed when it was chosen may be completed by
    now, and forgotten it would run again. `on_each` is told how many have had their turn.
    """

    def forget_unchanged(record: Record, _: Note) -> None:
        ledger.forget(record.key, found=record)

    return _change(ledger, records, "forgotten", Note.of(by, why), forget_unchanged, on_each)


def _change(
    ledger: Ledger,
    records: Sequence[Record],
    event: str,
    note: Note,
    change: Callable[[Record, Note], None],
    on_each: OnEach,
) -> Changed:
    found = {record.key: record for record in records}
    return change_each(
        ledger, [*found], event, note, lambda key, note: change(found[key], note), on_each
    )


def change_each(
    ledger: Ledger,
    keys: Sequence[Key],
    event: str,
    note: Note,
    change: Callable[[Key, Note], None],
    on_each: OnEach,
) -> Changed:
    """Note the action in the audit; change one after another; log those that were not refused.
    Raises StoreError, which says how many were changed before.
    """
    done: list[Key] = []
    refused: list[OperatorRefusal] = []
    if not keys:
        return Changed(done, refused, *note)
    check_keys(keys)
    with audited(ledger, event, note, about(keys), len(keys)) as tally:
        try:
            for turn, key in enumerate(keys, start=1):
                try:
                    change(key, note)
                except RefusedError as error:
                    refused.append(OperatorRefusal(key, str(error)))
                    tally.refused += 1
                else:
                    done.append(key)
                    tally.changed += 1
                    facts = {"event": event, **key._asdict(), **note._asdict()}
                    _log.info(_SENTENCES[event], extra=facts)
                on_each(turn)
        except StoreError as error:
            raise cut_short(error, len(done), len(keys)) from error
    return Changed(done, refused, *note, tally.audit_error)
