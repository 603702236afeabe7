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


class Telling:
    """Reports each turn that has ended, and adds it to `report`."""

    def __init__(self, settings: ConsumerSettings, report: ConsumerReport) -> None:
        self._settings = settings
        self._report = report

    def tell(self, turn: DeliveryTurn, ending: Ending) -> None:
        """Report that the turn has ended in this way."""
        report = self._report
        report.dead_lettered += isinstance(ending.verdict, DeadLetter)
        match ending.counted:
            case Counted.HANDLED:
                report.handled += 1
            case Counted.DUPLICATE:
                report.duplicates += 1
            case Counted.RETRIED:
                report.retried += 1
                self._failed(turn, self._settings.on_retry)
            case Counted.FAILED | Counted.REJECTED:
                report.failed += 1
                self._failed(turn, self._settings.on_failed)
            case Counted.SET_ASIDE:
                self._failed(turn, is_refused=True)

    def _failed(
        self, turn: DeliveryTurn, listeners: Sequence[Listener] = (), *, is_refused: bool = False
    ) -> None:
        error = turn.error or turn.refusal
        told: dict[str, Any] = {
            "message_id": turn.message.id,
            "consumer": self._settings.name,
            "queue": self._settings.queue,
            "type": turn.message.type,
            "attempt": turn.attempts,
            "next_try_in_s": turn.verdict.delay_s if isinstance(turn.verdict, Delay) else None,
        }
        if is_refused:
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
