"""The audit: every change that a person makes through here is noted in it, before it is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Required, TypedDict, TypeVar

from oncely._util.event_log import EventLog
from oncely.core.activity import AuditEntry
from oncely.core.errors import ConfigError, RefusedError, StoreError, describe
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger

_log = EventLog(__name__)

Item = TypeVar("Item")


class Noted(TypedDict, total=False):
    """What every change of several takes: who makes it, and why; and what is called after each,
    with the number of those that have had their turn.
    """

    by: Required[str]
    why: str
    on_each: Callable[[int], None]


class Note(NamedTuple):
    """Who changes something, and why: cut, and with passwords masked."""

    by: str
    why: str

    @classmethod
    def of(cls, by: str, why: str) -> "Note":
        """As it can be kept."""
        return cls(describe(by, MAX_ID_LENGTH), describe(why))


@dataclass(slots=True)
class AuditCounts:
    """What an action has come to so far."""

    changed: int = 0
    refused: int = 0
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""


@dataclass(frozen=True, slots=True)
class Removed(Generic[Item]):
    """What a purge, or an archiving, has removed."""

    counts: Mapping[str, Item]
    """By consumer."""
    audit_error: str | None
    """Why the counts are not in the audit, where they could not be kept there."""


class Refusal(NamedTuple, Generic[Item]):
    """What was left as it is: the record of a key, or the message of a number."""

    key: Item
    reason: str


@dataclass(frozen=True, slots=True)
class Changed(Generic[Item]):
    """What became of those that were to be changed: records by their keys, messages by their
    numbers.
    """

    done: Sequence[Item]
    refused: Sequence[Refusal[Item]]
    by: str
    why: str
    """Who and why, as they were noted: cut, and with passwords masked."""
    audit_error: str | None = None
    """Why the counts are not in the audit, where they could not be kept there."""
    next_steps: Mapping[Item, str] = field(default_factory=dict)
    """What comes next for each that was changed, and who does it, as far as that is known."""

    @property
    def missing(self) -> Sequence[Item]:
        """Those that were refused, as messages are that do not exist any more."""
        return [refusal.key for refusal in self.refused]


def about(keys: Sequence[Key]) -> Key:
    """What an action on these is about: the first one, and its consumer if all have the same."""
    consumers = {key.consumer for key in keys}
    return Key(keys[0].consumer if len(consumers) == 1 else "", keys[0].message_id)


@contextmanager
def audited(
    ledger: Ledger, action: str, note: Note, key: Key, chosen: int | None = None
) -> Iterator[AuditCounts]:
    """Note one action before the block, which carries it out, and after it what it has counted.

    `key` says what the action is about, `chosen` how many are to be changed, where that is known.
    Raises the store's error if the action cannot be noted beforehand: the block is not run, so
    that nothing changes without a trace. If the block raises, the entry has what was changed at
    least. If the counts cannot be kept, that is logged, and in `audit_error`: the change is done.
    """
    entry = AuditEntry(0, 0.0, note.by, action, *key, chosen, None, None, note.why)
    try:
        id_ = ledger.operations.note(entry)
    except StoreError as error:
        told = f"nothing was changed, as the audit cannot be written: {error}"
        raise type(error)(told) from error
    tally, is_known = AuditCounts(), False
    try:
        yield tally
        is_known = True
    except (ConfigError, RefusedError) as error:
        # What had no turn before a mistake of the caller, or a refusal, is as it was.
        is_known, tally.refused = True, tally.refused + isinstance(error, RefusedError)
        raise
    finally:
        if is_known or tally.changed:
            refused = tally.refused if is_known else None
            try:
                ledger.operations.note_counts(id_, tally.changed, refused)
            except StoreError as error:
                tally.audit_error = describe(error)
                facts = {"action": action, "by": note.by, "reason": tally.audit_error}
                _log.error(
                    "the counts of '%(action)s' by %(by)s could not be written into the audit: "
                    "%(reason)s; the action itself stays",
                    extra={"event": "audit_not_completed", **facts},
                )


def change_each(
    ledger: Ledger,
    action: str,
    items: Sequence[Item],
    keys: Sequence[Key],
    change: Callable[[Item, Mapping[str, str]], None],
    *,
    by: str,
    why: str = "",
    on_each: Callable[[int], None] = lambda _: None,
) -> Changed[Item]:
    """Note the action in the audit, and change one after another, of those that there are, which
    have these keys. Raises StoreError, which says how far it came: whoever reads that the ledger is
    away would think that nothing is changed.
    """
    note = Note.of(by, why)
    if not keys:
        return Changed([], [Refusal(item, "it is not there") for item in items], *note)
    done: list[Item] = []
    refused: list[Refusal[Item]] = []
    with audited(ledger, action, note, about(keys), len(items)) as tally:
        for turn, item in enumerate(items, start=1):
            try:
                change(item, note._asdict())
            except RefusedError as error:
                refused.append(Refusal(item, str(error)))
                tally.refused += 1
            except StoreError as error:
                raise type(error)(
                    f"{error}; {len(done):,} of {len(items):,} were changed before that, whether "
                    "the next one was is not known"
                ) from error
            else:
                done.append(item)
                tally.changed += 1
            on_each(turn)
    return Changed(done, refused, *note, tally.audit_error)
