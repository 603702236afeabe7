"""From a RabbitMQ queue into a spool: only messages that are durable there are acknowledged."""

import time
from collections.abc import Iterator

from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely.consumer.health import BrokerOutage
from oncely.core.errors import BrokerRefused, TransportError
from oncely.core.verdicts import Ack
from oncely.spark.rabbitmq.source_options import RabbitmqOptions
from oncely.spark.rabbitmq.spool import Spool
from oncely.transports.transport import Delivery

_log = EventLog(__name__)

_QUIET_S = 0.1
"""A queue without a message for so long counts as empty."""
_OUTAGE_S = 120.0
"""How long to wait for a broker that is unavailable."""
_SURE_S = 10.0
"""How long to wait for the first message, if the broker says that there are messages."""
_COUNTS = 3


class Spooler:
    """Takes the queue's messages into the spool, segment after segment.

    Raises TransportError if the broker cannot be reached: at once if it never was reached, else
    after two minutes.
    """

    def __init__(self, options: RabbitmqOptions) -> None:
        self.spool = Spool(options.spool)
        self._options = options
        self._transport = options.transport()
        self._was_reached = False
        self._outage = BrokerOutage(options.queue)

    def open(self) -> None:
        """Lock the spool. Raises ConfigError as `Spool.open` does."""
        self.spool.open(self._options.queue)

    def close(self) -> None:
        """Requeue messages that are not acknowledged, and release the spool."""
        self._transport.close()
        self.spool.close()

    def take(self, limit: int, after: int = 0, *, is_sure: bool = False) -> tuple[int, int]:
        """Take at most `limit` messages into one segment, with a number above `after`; return the
        number, and the count of messages. It is 0, without a segment, if none came in time; with
        `is_sure` that time is longer. A segment has at most `prefetch` messages of the URL.
        """
        wait_s = self._options.wait_s
        deliveries = self._gathered(limit, max(wait_s, _SURE_S) if is_sure else wait_s)
        if not deliveries:
            return after, 0
        number = self.spool.write([delivery.message for delivery in deliveries], after)
        reached("segment_stored")
        try:
            self._transport.acknowledge([(delivery, Ack()) for delivery in deliveries])
        except (TransportError, BrokerRefused):
            # They are durable; the broker redelivers them, and the ledger knows them then.
            _log.warning(
                "%(count)s messages in the spool could not be acknowledged: %(reason)s; they are "
                "delivered again",
                exc_info=True,
                extra={"event": "acknowledgements_lost", "count": len(deliveries)},
            )
        reached("segment_acknowledged")
        return number, len(deliveries)

    def take_all(self, after: int = 0) -> int:
        """Take all messages now in the queue; return the number of the last segment."""
        left = self.waiting()
        number, taken = after, 1
        while left > 0 and taken:
            limit = min(left, self._options.max_messages)
            number, taken = self.take(limit, number, is_sure=True)
            left -= taken
        return number

    def waiting(self) -> int:
        """How many messages are ready in the queue now."""
        from oncely.transports.rabbitmq.connection import Line
        from oncely.transports.rabbitmq.topology import waiting
        from oncely.transports.rabbitmq.url_options import read_options

        address, _, told = self._options.url().partition("?")
        parameters, _ = read_options(address, told)
        line = Line(parameters)
        try:
            line.wait_until_open()
            # A busy broker may answer zero: ask again.
            return max(waiting(line, self._options.queue) for _ in range(_COUNTS))
        finally:
            line.close()

    def _gathered(self, limit: int, wait_s: float) -> list[Delivery]:
        """The messages of one segment; reconnects if the broker is unavailable."""
        until = time.monotonic() + _OUTAGE_S
        while True:
            try:
                gathered = list(self._gather(limit, wait_s))
            except TransportError as error:
                if not self._was_reached or time.monotonic() >= until:
                    raise
                self._outage.met(error)
            else:
                self._outage.over()
                self._was_reached = True
                return gathered

    def _gather(self, limit: int, wait_s: float) -> Iterator[Delivery]:
        """Messages until there are enough, or no more are ready. Raises TransportError only before
        the first: messages that have come can be spooled, even if they are redelivered later.
        """
        until = time.monotonic() + self._options.wait_s
        taken = 0
        while taken < limit:
            try:
                more = self._transport.receive(self._options.queue, limit - taken, wait_s)
            except (TransportError, BrokerRefused):
                if not taken:
                    raise
                return
            if not more:
                return
            yield from more
            taken += len(more)
            # A steady producer does not delay the segment.
            wait_s = max(0.0, min(_QUIET_S, until - time.monotonic()))
