"""Acknowledging: ends deliveries at the transport, and waiting messages in the ledger."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.consuming.retries import Retries
from oncely.consuming.turn import DeliveryTurn
from oncely.core.errors import BrokerRefused, StoreDenied, StoreError, TransportError
from oncely.core.verdicts import Ack, Acknowledgement, DeadLetter, Delay, End, Reject, Requeue
from oncely.transports.transport import Transport

_log = EventLog(__name__)


class Acknowledger:
    """Settles turns that have ended. Without `retries` the ledger keeps no waiting messages and no
    dead letters. After `stop`, messages to redeliver go back when the connection closes.
    """

    def __init__(
        self, transport: Transport, retries: Retries | None, stop: threading.Event
    ) -> None:
        self._transport = transport
        self._retries = retries
        self._stop = stop
        self._outage = Outage(
            _log,
            "settling_failed",
            "%(count)s deliveries could not be acknowledged: %(reason)s; they are redelivered",
            "settling_recovered",
            "deliveries are acknowledged again after %(away_s)s s",
        )

    def is_put_off(self, turn: DeliveryTurn) -> bool:
        """Whether the delivery stays here, unacknowledged, until its retry."""
        return isinstance(turn.verdict, Delay) and turn.taken is None and not self._is_kept(turn)

    def acknowledge(self, turns: Sequence[DeliveryTurn]) -> None:
        """Acknowledge these turns; a failure to acknowledge is logged."""
        taken = [turn for turn in turns if turn.taken is not None]
        verdicts = [(turn.delivery, self._verdict(turn)) for turn in turns if turn.taken is None]
        if self._stop.is_set():
            # When the connection closes, each message goes back to its old place. A message that is
            # requeued singly goes to the end of some queues, behind others of its order.
            verdicts = [each for each in verdicts if each[1] != Requeue()]
        if taken and self._retries is not None:
            with self._logged("the ledger", len(taken)):
                self._retries.acknowledge(taken)
        if verdicts:
            with self._logged("the broker", len(verdicts)):
                self._transport.acknowledge(verdicts)

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

    def _verdict(self, turn: DeliveryTurn) -> Acknowledgement:
        if self._is_kept(turn):
            return Ack()
        match turn.verdict:
            case Ack():
                return Ack()
            case DeadLetter(reason):
                return Reject(reason)
        return Requeue()

    def _is_kept(self, turn: DeliveryTurn) -> bool:
        """Whether the ledger has the message, waiting or as a dead letter."""
        if self._retries is None or turn.ending is None:
            return False
        end, verdict, _ = turn.ending
        is_stored = end in (End.FAILED, End.EXHAUSTED)
        return turn.waits or is_stored or isinstance(verdict, DeadLetter)
