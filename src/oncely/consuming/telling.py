"""Telling: counts and logs how messages have ended, and calls the listeners."""

from collections.abc import Sequence
from typing import Any

from oncely._util.event_log import EventLog
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.settings import ConsumerSettings, Listener
from oncely.consuming.turn import DeliveryTurn
from oncely.core.verdicts import Counted, DeadLetter, Delay, Ending
from oncely.lifecycle.failures import log_failure

_log = EventLog(__name__)


def tell(
    turn: DeliveryTurn, ending: Ending, settings: ConsumerSettings, report: ConsumerReport
) -> None:
    """Report that the turn has ended in this way, and add it to `report`."""
    report.dead_lettered += isinstance(ending.verdict, DeadLetter)
    listeners: Sequence[Listener] = ()
    match ending.counted:
        case Counted.HANDLED:
            report.handled += 1
            return
        case Counted.DUPLICATE:
            report.duplicates += 1
            return
        case Counted.SKIPPED | Counted.GIVEN_BACK:
            return
        case Counted.RETRIED:
            report.retried += 1
            listeners = settings.on_retry
        case Counted.FAILED | Counted.REJECTED:
            report.failed += 1
            listeners = settings.on_failed
    error = turn.error or turn.refusal
    told: dict[str, Any] = {
        "message_id": turn.message.id,
        "consumer": settings.name,
        "queue": settings.queue,
        "type": turn.message.type,
        "attempt": turn.attempts,
        "next_try_in_s": turn.verdict.delay_s if isinstance(turn.verdict, Delay) else None,
    }
    if ending.counted is Counted.SET_ASIDE:
        _log.warning(
            "message '%(message_id)s' is refused: %(reason)s; it becomes a dead letter",
            exc_info=error,
            extra={"event": "refused", **told},
        )
    else:
        log_failure(_log, error, told)
    for listener in listeners:
        try:
            listener(error, turn.message)
        except Exception:  # noqa: BLE001 - a listener's error does not affect the message.
            _log.exception(
                "the function given to .catch or .failed has raised %(reason)s; message "
                "'%(message_id)s' is not affected",
                extra={"event": "listener_failed", "message_id": turn.message.id},
            )
