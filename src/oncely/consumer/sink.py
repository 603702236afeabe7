"""Where a consumer's deliveries end: they are counted, logged and acknowledged."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.consumer.report import ConsumerReport
from oncely.consumer.settings import ConsumerSettings, Listener
from oncely.consumer.source import DueRetries
from oncely.consumer.turn import DeliveryTurn
from oncely.core.errors import BrokerRefused, OncelyError, StoreDenied, StoreError, TransportError
from oncely.core.errors_by_kind import with_error
from oncely.core.verdicts import (
    KEPT,
    Ack,
    Acknowledgement,
    Counted,
    DeadLetter,
    Delay,
    Ending,
    Reject,
    Requeue,
)
from oncely.lifecycle.failures import log_failure
from oncely.transports.transport import Delivery, Transport

_log = EventLog(__name__)


@dataclass(eq=False)
class DeliverySink:
    """Counts in `report` how deliveries have ended, tells the listeners, and acknowledges.

    Without `retries` the ledger keeps no waiting messages and no dead letters. After `stop`,
    messages to redeliver go back when the connection closes.
    """

    _settings: ConsumerSettings
    _transport: Transport
    _retries: DueRetries | None
    _report: ConsumerReport
    _stop: threading.Event

    def __post_init__(self) -> None:
        self._outage = Outage(
            _log,
            "acknowledging_failed",
            "%(count)s deliveries could not be acknowledged: %(reason)s; they are redelivered",
            "acknowledging_recovered",
            "deliveries are acknowledged again after %(away_s)s s",
        )

    # ---- People and listeners ------------------------------------------------------------------

    def count(self, turn: DeliveryTurn, ending: Ending) -> None:
        """As in Sink: a failure is logged, and the listeners are called."""
        report, settings = self._report, self._settings
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
            case Counted.IN_DOUBT:
                report.in_doubt += 1
        error = turn.error or turn.refusal
        report.errors = with_error(report.errors, error)
        told: dict[str, Any] = {
            "message_id": turn.message.id,
            "consumer": settings.name,
            "queue": settings.queue,
            "type": turn.message.type,
            "attempt": turn.attempts,
        }
        if ending.counted is Counted.SET_ASIDE:
            _log.warning(
                "message '%(message_id)s' is refused: %(reason)s; it becomes a dead letter",
                error=error,
                # Of ours, it says nothing more; of others, as of a `key` that raises, where.
                exc_info=None if isinstance(error, OncelyError) else error,
                extra={"event": "refused", **told},
            )
        else:
            log_failure(_log, error, ending, told)
        for listener in listeners:
            try:
                listener(error, turn.message)
            except Exception:  # noqa: BLE001 - a listener's error does not affect the message.
                _log.exception(
                    "the function given to .catch or .failed has raised %(reason)s; message "
                    "'%(message_id)s' is not affected",
                    extra={"event": "listener_failed", "message_id": turn.message.id},
                )

    # ---- The broker, and the ledger ------------------------------------------------------------

    def acknowledge(self, turns: Sequence[DeliveryTurn]) -> Sequence[DeliveryTurn]:
        """As in Sink: a retry stays here where the ledger does not keep it.

        A failure to acknowledge is logged, since the message is redelivered then. Raises
        StoreDenied and BrokerRefused if it would fail for every message.
        """
        verdicts: list[tuple[Delivery, Acknowledgement]] = []
        put_off, taken = [], []
        for turn in turns:
            verdict = None if turn.ending is None else turn.ending.verdict
            if turn.taken is not None:
                taken.append(turn)
            elif verdict == Ack() or self._is_kept(turn):
                verdicts.append((turn.delivery, Ack()))
            elif isinstance(verdict, Delay):
                put_off.append(turn)
            elif isinstance(verdict, DeadLetter):
                verdicts.append((turn.delivery, Reject(verdict.reason)))
            elif not self._stop.is_set():
                # Else it goes back to its old place when the connection closes. A message that is
                # requeued singly goes to the end of some queues, behind others of its order.
                verdicts.append((turn.delivery, Requeue()))
        if taken:
            self.give_back(taken)
        if verdicts:
            with self._logged("the broker", len(verdicts)):
                self._transport.acknowledge(verdicts)
        if self._retries is not None:
            self._retries.expect(turns)
        return put_off

    def give_back(self, turns: Sequence[DeliveryTurn]) -> None:
        """As in Sink: the broker redelivers its own when the connection closes."""
        taken = [turn for turn in turns if turn.taken is not None]
        if taken and self._retries is not None:
            with self._logged("the ledger", len(taken)):
                self._retries.acknowledge(taken)

    @contextmanager
    def _logged(self, by: str, count: int) -> Iterator[None]:
        try:
            yield
        except (StoreError, TransportError, BrokerRefused) as error:
            if StoreDenied in (type(error), type(error.__cause__)):
                # It would be met with each message, and each would be redelivered for ever.
                raise
            # They are redelivered, and the ledger knows them.
            self._outage.met(error, by, count=count)
        else:
            self._outage.over(by)

    def _is_kept(self, turn: DeliveryTurn) -> bool:
        """Whether the ledger has the message, waiting or as a dead letter."""
        if self._retries is None or turn.ending is None:
            return False
        return turn.waits or turn.ending.end in KEPT
