"""What comes next for a message, and who does it: said with every decision about it."""

from collections.abc import Collection, Mapping
from contextlib import suppress

from oncely.core.activity import Worker
from oncely.core.errors import StoreError
from oncely.core.record import Key, Record, State
from oncely.core.rules import Standing, standing
from oncely.core.shown import moment
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import Ledger
from oncely.ops.activity import workers

_AT_ONCE = 500
_SENDER = "Celery, an HTTP client, a script"
_STATED = {
    Standing.COMPLETED: "completed: nothing of it runs again",
    Standing.HANDLED: "handled: what it has sent waits for a relay",
    Standing.HELD: "a worker is processing it now",
    Standing.IN_DOUBT: "in doubt: somebody has to settle it",
    Standing.EXHAUSTED: "failed permanently: nothing of it runs unless somebody retries it",
    Standing.FAILED: "failed: it runs when its sender sends it again",
    Standing.ABSENT: "its next delivery is treated as new",
}


def next_steps(ledger: Ledger, keys: Collection[Key]) -> Mapping[Key, str]:
    """What comes next for each of these messages, and who does it.

    Nothing where the ledger cannot be asked: the decision that was made before stays.
    """
    steps: dict[Key, str] = {}
    with suppress(StoreError):
        at_work, named = _at_work(ledger), [key for key in keys if key.message_id]
        for start in range(0, len(named), _AT_ONCE):
            some = named[start : start + _AT_ONCE]
            now, records = ledger.now(), ledger.find_many(some)
            # Only of these it is not known whether a message of theirs waits.
            unsure = [key for key in some if _may_wait(records.get(key))]
            waiting = ledger.mailbox.retries(unsure) if unsure else {}
            for key in some:
                steps[key] = _next(key, records.get(key), waiting.get(key), now, at_work)
    return steps


def _may_wait(record: Record | None) -> bool:
    return record is None or record.waits_for_sender


def _next(
    key: Key,
    record: Record | None,
    waiting: WaitingMessage | None,
    now: float,
    at_work: Collection[Worker] | None,
) -> str:
    due = None if record is None or record.state is not State.FAILED else record.lease_until
    if waiting is not None and not waiting.is_set_aside:
        due = waiting.due or now
    if due is not None:
        when = "due now" if due <= now else f"due at {moment(due, now)}"
        return f"{when}: {_taker(key.consumer, waiting.destination if waiting else '', at_work)}"
    if record is not None and record.waits_for_sender:
        since = moment(record.last_seen, now)
        return f"may run again; waits for its sender ({_SENDER}) since {since}"
    return _STATED[standing(record, now)]


def _taker(consumer: str, framework: str, at_work: Collection[Worker] | None) -> str:
    """Who takes a message that waits in the ledger; `framework` where it is sent to its broker."""
    if framework:
        is_there = at_work is None or any(each.kind == framework for each in at_work)
        who, does = f"worker of {framework.title()}", "sends it to its broker again"
    else:
        its = (consumer, "")
        is_there = at_work is None or any(
            each.kind in ("consumer", "spark") and each.consumer in its for each in at_work
        )
        who, does = f"worker of {consumer!r}", "takes it"
    return f"a {who} {does}" if is_there else f"no {who} is running: start one"


def relay_step(ledger: Ledger) -> str:
    """What comes next for a message that is to be sent."""
    with suppress(StoreError):
        at_work = _at_work(ledger)
        if at_work is None or any(each.kind in ("relay", "consumer") for each in at_work):
            return "a relay sends it"
    return "no relay is running: start one, such as oncely relay"


def _at_work(ledger: Ledger) -> Collection[Worker] | None:
    """The processes that live; None where the store keeps none."""
    if not ledger.operations.keeps_operations:
        return None
    return [each.worker for each in workers(ledger) if each.is_alive]
