"""From a RabbitMQ queue into a spool: what is durable there is acknowledged, and nothing else."""

import logging
import time
from collections.abc import Iterator

from oncely._util.crash_points import reached
from oncely.core.errors import BrokerRefused, TransportError
from oncely.core.verdicts import Ack
from oncely.spark.rabbitmq.source_options import RabbitmqOptions
from oncely.spark.rabbitmq.spool import Spool
from oncely.transports.transport import Delivery

_log = logging.getLogger(__name__)

_QUIET_S = 0.1
"""A queue that brings nothing for so long is empty for now."""
_OUTAGE_S = 120.0
"""So long is waited for a broker that went away."""
_SURE_S = 10.0
"""So long is waited, where the broker has told that there are messages, for the first of them."""
_COUNTS = 3


class Spooler:
    """Takes what is in the queue into the spool, segment after segment.

    Raises TransportError when the broker cannot be reached: at once where it never could be, and
    else when it is away for two minutes.
    """

    def __init__(self, options: RabbitmqOptions) -> None:
        self.spool = Spool(options.spool)
        self._options = options
        self._transport = options.transport()
        self._was_reached = False

    def open(self) -> None:
        """Have the spool for oneself. Raises ConfigError as `Spool.open` does."""
        self.spool.open(self._options.queue)

    def close(self) -> None:
        """Give the messages back that are not acknowledged, and the spool to others."""
        self._transport.close()
        self.spool.close()

    def take(self, limit: int, after: int = 0, *, is_sure: bool = False) -> tuple[int, int]:
        """Take at most `limit` messages into one segment, with a number above `after`; return
        that and how many they are: 0 where none came in time, which leaves no segment. That is
        a longer time where one `is_sure` that there are some. No segment has more messages, or
        larger ones in all, than the URL's `prefetch` and `prefetch_bytes` let the broker send.
        """
        wait_s = self._options.wait_s
        deliveries = self._gathered(limit, max(wait_s, _SURE_S) if is_sure else wait_s)
        if not deliveries:
            return after, 0
        number = self.spool.write([delivery.message for delivery in deliveries], after)
        reached("segment_stored")
        self._acknowledge(deliveries)
        reached("segment_acknowledged")
        return number, len(deliveries)

    def take_all(self, after: int = 0) -> int:
        """Take what is in the queue by now; return the number of the last segment."""
        left = self.waiting()
        number, taken = after, 1
        while left > 0 and taken:
            limit = min(left, self._options.max_messages)
            number, taken = self.take(limit, number, is_sure=True)
            left -= taken
        return number

    def waiting(self) -> int:
        """How many messages the broker has for receivers now."""
        from oncely.transports.rabbitmq.connection import Line
        from oncely.transports.rabbitmq.topology import waiting
        from oncely.transports.rabbitmq.url_options import read_options

        address, _, told = self._options.url().partition("?")
        parameters, _ = read_options(address, told)
        line = Line(parameters)
        try:
            line.wait_until_open()
            # A broker that is busy says zero rather than nothing.
            return max(waiting(line, self._options.queue) for _ in range(_COUNTS))
        finally:
            line.close()

    def _gathered(self, limit: int, wait_s: float) -> list[Delivery]:
        """The messages of one segment, however often the broker goes away meanwhile."""
        until = time.monotonic() + _OUTAGE_S
        while True:
            try:
                gathered = list(self._gather(limit, wait_s))
            except TransportError:
                if not self._was_reached or time.monotonic() >= until:
                    raise
                _log.warning("broker_away", exc_info=True)
            else:
                self._was_reached = True
                return gathered

    def _gather(self, limit: int, wait_s: float) -> Iterator[Delivery]:
        """Messages until there are enough, or no more at hand. Raises TransportError before the
        first alone: what has come can be spooled, though it may not be acknowledged any more.
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
            # Who publishes steadily does not hold up what is here.
            wait_s = max(0.0, min(_QUIET_S, until - time.monotonic()))

    def _acknowledge(self, deliveries: list[Delivery]) -> None:
        try:
            self._transport.settle([(delivery, Ack()) for delivery in deliveries])
        except (TransportError, BrokerRefused):
            # They are durable, and redelivered: the ledger knows them then.
            _log.warning("acknowledgements_lost", extra={"count": len(deliveries)}, exc_info=True)
