"""What operators can decide: of records, dead letters, retries, refused messages and workers."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from oncely import ops


@dataclass(frozen=True, slots=True)
class OperatorDecision:
    """One thing that can be done, and the words for it."""

    name: str
    label: str
    """On its button."""
    meaning: str
    """What it does to each, for the page that asks once more."""
    done: str
    """What then has become of each."""
    apply: Callable[..., Any]
    """As `ops.happened` for records, as `ops.retry_letters` for dead letters."""
    words: Collection[str] = ()
    """Of `ops.STATES`: where the records stand of which it can be decided."""
    is_for_ever: bool = False
    needs_probe: bool = False
    """Whether only a consumer with a probe can have it."""


def _named(*decisions: OperatorDecision) -> dict[str, OperatorDecision]:
    return {each.name: each for each in decisions}


_MAY_RUN = (
    "The message may run again, its attempts from zero: at once where it waits in the ledger or is "
    "a dead letter, else when its sender sends it again."
)

RECORDS = _named(
    OperatorDecision(
        "happened",
        "Settle: it happened",
        "The message is completed: nothing of it runs again, neither a redelivery nor a retry that "
        "waits. A worker that still runs it has lost its claim.",
        "settled",
        ops.happened,
        [ops.IN_DOUBT],
    ),
    OperatorDecision(
        "not-happened",
        "Settle: it did not happen",
        f"{_MAY_RUN} If its effect has happened after all, it happens twice, unless the handler "
        "uses steps or the idempotency key.",
        "settled",
        ops.not_happened,
        [ops.IN_DOUBT],
    ),
    OperatorDecision(
        "retry",
        "Retry",
        _MAY_RUN,
        "retried",
        ops.reset,
        [word for word in ops.RESETTABLE if word != ops.IN_DOUBT],
    ),
    OperatorDecision(
        "probe",
        "Probe now",
        "The consumer's own probe is asked whether the effect has happened. If it has, the message "
        "is completed; if it has not, the message may run again; if the probe does not know, the "
        "message stays in doubt.",
        "settled by the probe",
        ops.probe,
        [ops.IN_DOUBT],
        needs_probe=True,
    ),
    OperatorDecision(
        "forget",
        "Forget",
        "The record is removed, with its steps and what it has deferred; the next delivery of the "
        "message is treated as new.",
        "forgotten",
        ops.forget,
        [word for word in ops.STATES if word != "processing"],
        is_for_ever=True,
    ),
)

LETTERS = _named(
    OperatorDecision(
        "retry",
        "Retry",
        "The message is handled again at once, its attempts from zero.",
        "retried",
        ops.retry_letters,
    ),
    OperatorDecision(
        "discard",
        "Discard",
        "The message is removed for ever; its record stays, so that a redelivery does not run.",
        "discarded",
        ops.discard_letters,
        is_for_ever=True,
    ),
)


WAITING = _named(
    OperatorDecision(
        "retry",
        "Retry",
        "The message is due at once, its attempts from zero.",
        "retried",
        ops.retry,
    ),
    OperatorDecision(
        "discard",
        "Discard",
        "The message is not retried by itself any more: it becomes a dead letter, which can be "
        "retried.",
        "discarded",
        ops.discard_waiting,
        is_for_ever=True,
    ),
)

UNSENT = _named(
    OperatorDecision(
        "retry",
        "Retry",
        "A relay sends the message again, its attempts from zero.",
        "retried",
        ops.retry_unsent,
    ),
    OperatorDecision(
        "discard",
        "Discard",
        "The message is never sent. The message whose handler sent it is completed, if this was "
        "the last.",
        "discarded",
        ops.discard_unsent,
        is_for_ever=True,
    ),
)

WORKERS = _named(
    OperatorDecision(
        "dead",
        "It is dead: end its claims",
        "Its claims end at once, and not with their leases: each message is in doubt, and what the "
        "worker still writes is refused.",
        "claims ended",
        ops.worker_dead,
        is_for_ever=True,
    ),
)


def needs_note(decided: OperatorDecision, count: int) -> bool:
    """Whether somebody has to say why: of many at once, and of what cannot be taken back."""
    return decided.is_for_ever or count > 1
