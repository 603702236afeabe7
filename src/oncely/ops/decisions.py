"""What people decide about records: to run again, to be done, to be forgotten; and a consumer's own
probe, which they ask about a message in doubt.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from oncely._util.event_log import EventLog
from oncely.core.durations import Duration, seconds
from oncely.core.errors import RefusedError, describe
from oncely.core.message import Message
from oncely.core.policy import Finding, Probe
from oncely.core.record import Key, Record, check_key, check_keys
from oncely.core.rules import Standing, standing
from oncely.core.shown import span
from oncely.core.state_words import word_with_lease
from oncely.core.waiting import ERASED, Erased
from oncely.ledger.ledger import Ledger
from oncely.ledger.probing import ProbeAnswer, probe_answer
from oncely.ops.auditing import Changed, Note, Noted, audited, change_each
from oncely.ops.known import check_known_at_all
from oncely.ops.next_steps import next_steps

_log = EventLog(__name__)

_SENTENCES = {
    "retried": "%(by)s retries message '%(message_id)s' of '%(consumer)s'",
    "settled_happened": "%(by)s has settled message '%(message_id)s' of '%(consumer)s': it has "
    "happened",
    "settled_not_happened": "%(by)s has settled message '%(message_id)s' of '%(consumer)s': it has "
    "not happened",
    "forgotten": "%(by)s has removed the record of message '%(message_id)s' of '%(consumer)s'",
    "worker_dead": "%(by)s has ended the claim on message '%(message_id)s' of '%(consumer)s', now "
    "in doubt: %(why)s",
    "discarded": "%(by)s has discarded message '%(message_id)s' of '%(consumer)s', which is a dead "
    "letter",
}
PROBE_S = 10.0
"""For how long a probe is waited for."""
_MOST = 16
"""Probes that run at a time, those among them that hang."""
_free = threading.BoundedSemaphore(_MOST)


def reset(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed[Key]:
    """Retry each: it may run again. Who did it, when and why is kept with the record, logged, and
    in the audit.
    """
    return retry(ledger, [record.key for record in records], **noted)


def retry(ledger: Ledger, keys: Sequence[Key], **noted: Unpack[Noted]) -> Changed[Key]:
    """As `reset`, by keys: also of messages that wait, and were never tried."""
    return change_keys(
        ledger, keys, "retried", lambda key, note: ledger.reset(key, **note), **noted
    )


def happened(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed[Key]:
    """Complete each that is in doubt, as somebody knows that its effect has happened: nothing of it
    runs again. Noted as by `reset`.

    A record that was claimed again since it was found is refused: of that claim nobody has said
    anything.
    """

    def confirm(record: Record, note: Mapping[str, Any]) -> None:
        ledger.happened(record.key, fence=record.fence, **note)

    return _change(ledger, records, "settled_happened", confirm, noted)


def not_happened(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed[Key]:
    """As `happened`, of effects that have not: each may run again, as after `reset`."""

    def allow(record: Record, note: Mapping[str, Any]) -> None:
        ledger.reset(record.key, fence=record.fence, **note)

    return _change(ledger, records, "settled_not_happened", allow, noted)


def forget(ledger: Ledger, records: Sequence[Record], **noted: Unpack[Noted]) -> Changed[Key]:
    """Remove each that is still as it was found; who did it and why is logged, and in the audit.

    A record that has changed is refused: what was failed when it was chosen may be completed by
    now, and forgotten it would run again.
    """

    def forget_unchanged(record: Record, _: Mapping[str, Any]) -> None:
        ledger.forget(record.key, found=record)

    return _change(ledger, records, "forgotten", forget_unchanged, noted)


def erase(ledger: Ledger, key: Key, *, by: str, why: str = "") -> tuple[Erased, str | None]:
    """As `Ledger.erase`, noted in the audit and logged, without the id. Returns what was found, and
    why the audit has no counts, where it could not be written. Raises ConfigError where nothing is
    found, and the ledger does not know the consumer.
    """
    note = Note.of(by, why.replace(check_key(key).message_id, ERASED))
    with audited(ledger, "erased", note, Key(key.consumer, ERASED)) as tally:
        found = ledger.erase(key)
        tally.changed = sum(found)
        if not any(found):
            check_known_at_all(ledger, key.consumer, "messages")
    told = "%(by)s has erased a message of '%(consumer)s': %(count)s things were kept of it"
    facts = {"consumer": key.consumer, "count": tally.changed, **note._asdict()}
    _log.info(told, extra={"event": "erased", **facts})
    return found, tally.audit_error


def _change(
    ledger: Ledger,
    records: Sequence[Record],
    event: str,
    change: Callable[[Record, Mapping[str, Any]], None],
    noted: Noted,
) -> Changed[Key]:
    found = {record.key: record for record in records}
    return change_keys(ledger, [*found], event, lambda key, note: change(found[key], note), **noted)


def change_keys(
    ledger: Ledger,
    keys: Sequence[Key],
    event: str,
    change: Callable[[Key, Mapping[str, Any]], None],
    **noted: Unpack[Noted],
) -> Changed[Key]:
    """Change one after another; log those that were not refused. Raises as `change_each` does."""
    check_keys(keys)

    def change_one(key: Key, note: Mapping[str, Any]) -> None:
        change(key, note)
        _log.info(_SENTENCES[event], extra={"event": event, **key._asdict(), **note})

    changed = change_each(ledger, event, keys, keys, change_one, **noted)
    return replace(changed, next_steps=next_steps(ledger, changed.done))


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe has found out about a message in doubt, and what came of that."""

    finding: Finding
    error: str | None
    """Why the probe could not tell, where it raised, hung, or gave something else than a finding.
    """
    changed: Changed[Key]
    """Nothing is changed where nobody knows more than before: the message is in doubt still."""


def probe(
    ledger: Ledger,
    record: Record,
    probe: Probe,
    *,
    by: str,
    why: str = "",
    within: Duration = PROBE_S,
) -> Probed:
    """Ask the consumer's own probe about a record in doubt, and do what follows: `happened`
    completes it, `not_happened` lets it run again, `unknown` leaves it as it is. What the probe has
    found out is in the audit in each case, with who asked and why.

    The probe is given the message as it waits in the ledger; where the broker has it, one with its
    id and an empty body. A probe that raises, which is logged, or gives no answer `within` that
    time, does not know. Raises RefusedError for a record that is not in doubt, and where too many
    probes hang.
    """
    where = standing(record, ledger.now())
    # A claim without an end never runs out: only people can say that it is in doubt.
    is_endless = where is Standing.HELD and record.lease_until is None
    if where is not Standing.IN_DOUBT and not is_endless:
        told = word_with_lease(record)
        raise RefusedError(f"it is {told}: only a record in doubt can be asked about")
    waiting = ledger.mailbox.retries([record.key]).get(record.key)
    message = Message(record.key.message_id, b"") if waiting is None else waiting.message
    answer = _asked(probe, message, seconds(within, "within"))
    error = "" if answer.error is None else f" ({answer.error})"
    told = f"probe: {answer.finding.replace('_', ' ')}{error}{f'; {why}' if why else ''}"
    match answer.finding:
        case "happened":
            changed = happened(ledger, [record], by=by, why=told)
        case "not_happened":
            changed = not_happened(ledger, [record], by=by, why=told)
        case _:
            note = Note.of(by, told)
            with audited(ledger, "probed", note, record.key, 1) as tally:
                _log.info(
                    "%(by)s had the probe asked about message '%(message_id)s': %(why)s",
                    extra={"event": "probed", **record.key._asdict(), **note._asdict()},
                )
            changed = Changed([], [], *note, tally.audit_error)
    return Probed(*answer, changed)


def _asked(probe: Probe, message: Message, within_s: float) -> ProbeAnswer:
    """What the probe says, in a thread of its own: nobody waits for one that hangs."""
    answers: list[ProbeAnswer] = []

    def ask() -> None:
        try:
            answers.append(probe_answer(probe, message))
        except BaseException as error:  # noqa: BLE001 - such as of sys.exit: it ends this thread.
            answers.append(ProbeAnswer("unknown", describe(error)))
        finally:
            _free.release()

    if not _free.acquire(blocking=False):
        raise RefusedError(
            f"{_MOST} probes have not come back yet: find out what they wait for, or restart this "
            "program"
        )
    thread = threading.Thread(target=ask, name="oncely-probe", daemon=True)
    thread.start()
    thread.join(within_s)
    late = ProbeAnswer("unknown", f"it has not answered within {span(within_s)}")
    return next(iter(answers), late)
