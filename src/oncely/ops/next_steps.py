"""What comes next for a message, and who does it: said with every decision about it."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from oncely.core.activity import Worker
from oncely.core.errors import StoreError
from oncely.core.record import Key, Record, State
from oncely.core.rules import Standing, standing
from oncely.core.shown import moment
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import Ledger
from oncely.ops.workers import workers

_AT_ONCE = 500
_STEPS = {
    Standing.COMPLETED: "completed: nothing of it runs again",
    Standing.HANDLED: "handled: what it has sent waits for a relay",
    Standing.HELD: "a worker is processing it now",
    Standing.IN_DOUBT: "in doubt: the policy of its consumer decides at its next delivery, or "
    "somebody settles it",
    Standing.EXHAUSTED: "failed permanently: nothing of it runs unless somebody retries it",
    Standing.FAILED: "failed: it runs when its sender sends it again",
    Standing.ABSENT: "its next delivery is treated as new",
}


def next_steps(ledger: Ledger, keys: Collection[Key]) -> Mapping[Key, str]:
    """What comes next for each of these messages, and who does it.

    Nothing where the ledger cannot be asked: the decision that was made before stays.
    """
    steps: dict[Key, str] = {}
    named = [key for key in keys if key.message_id]
    with suppress(StoreError):
        at_work = _at_work(ledger)
        for start in range(0, len(named), _AT_ONCE):
            some = named[start : start + _AT_ONCE]
            now, records = ledger.now(), ledger.find_many(some)
            # A record that was tried says by itself whether its message waits.
            unsure = [key for key in some if key not in records or records[key].waits_for_sender]
            waiting = ledger.mailbox.retries(unsure)
            for key in some:
                steps[key] = _next(key, records.get(key), waiting.get(key), now, at_work)
    return steps


def _next(
    key: Key,
    record: Record | None,
    waiting: WaitingMessage | None,
    now: float,
    at_work: Sequence[Worker] | None,
) -> str:
    due = record.lease_until if record is not None and record.state is State.FAILED else None
    doer = _by(at_work, f"worker of {key.consumer!r}", "takes it", ("consumer", "spark"), key)
    if waiting is not None and not waiting.is_set_aside:
        due, framework = waiting.due or now, waiting.destination
        if framework:
            name = "FastStream" if framework == "faststream" else framework.title()
            who, does = f"worker of {name}", "sends it to its broker again"
            doer = _by(at_work, who, does, (framework,))
    if due is not None:
        return f"{'due now' if due <= now else f'due at {moment(due, now)}'}: {doer}"
    if record is not None and record.waits_for_sender:
        sender = "its sender (a broker, an HTTP client, a script)"
        return f"may run again; waits for {sender} since {moment(record.last_seen, now)}"
    return _STEPS[standing(record, now)]


def relay_step(ledger: Ledger) -> str:
    """What comes next for a message that is to be sent."""
    with suppress(StoreError):
        return _by(_at_work(ledger), "relay", "sends it", ("relay", "consumer"))
    return "a relay sends it"


def _at_work(ledger: Ledger) -> Sequence[Worker] | None:
    """The processes that live; None where the store does not keep them."""
    if not ledger.operations.keeps_operations:
        return None
    return [each.worker for each in workers(ledger) if each.is_alive]


def _by(
    at_work: Sequence[Worker] | None,
    who: str,
    does: str,
    kinds: Collection[str],
    key: Key | None = None,
) -> str:
    """Who does it, of a process of these kinds; or that there is none, as far as that is known."""
    its = (each for each in at_work or () if each.kind in kinds)
    is_there = any(key is None or each.consumer in (key.consumer, "") for each in its)
    if is_there or at_work is None:
        return f"a {who} {does}"
    return f"no {who} is running: start one"
