"""The two connections of a transport, and the queues that it consumes through one of them."""

import threading
from collections.abc import Set

from pika.connection import Parameters

from oncely._util.clock import monotonic
from oncely.transports.rabbitmq.connection import ChannelLost, Reach
from oncely.transports.rabbitmq.intake import Intake
from oncely.transports.rabbitmq.publisher import Publisher
from oncely.transports.rabbitmq.topology import consumers, make_queue, waiting
from oncely.transports.rabbitmq.url_options import RabbitSettings

_RESOURCE_LOCKED = 405
_TAKEN_BACK_S = 5.0
_LOOK_S = 0.05


class Session:
    """The connections of one process, until they are closed."""

    def __init__(self, parameters: Parameters, settings: RabbitSettings, alone: Set[str]) -> None:
        self.consuming = Reach(parameters)
        """The connection for receiving, which does not depend on publishing."""
        self.publisher = Publisher(parameters, settings.confirm_timeout_s, settings.queue_type)
        self.closed = threading.Event()
        """Set when the session is closed."""
        self._settings = settings
        self._alone = alone
        self._lock = threading.Lock()
        self._intakes: dict[str, Intake] = {}
        self._others: dict[str, int] = {}
        """How many other consumers a queue had when this one began."""
        self._counted: set[str] = set()
        """The queues of which only the broker's count says whether they are empty."""

    def intake(self, queue: str, until: float = 0.0) -> Intake:
        """The intake of a queue; if it is not open, tries to open it until that moment."""
        intake = self._intakes.get(queue)
        if intake is not None and not intake.is_over:
            return intake
        with self._lock:
            intake = self._intakes.get(queue)
            if intake is None or intake.is_over:
                line = self.consuming.line(until)
                make_queue(line, queue, self._settings.queue_type)
                # The broker has to requeue the messages of a lost connection first: to a consumer
                # that comes sooner, it would deliver later messages first.
                taken_back_at = monotonic() + _TAKEN_BACK_S
                found = consumers(line, queue)
                others = 0 if queue in self._alone else self._others.setdefault(queue, found)
                while found > others and monotonic() < taken_back_at:
                    if self.closed.wait(_LOOK_S):
                        break
                    found = consumers(line, queue)
                intake = self._intakes[queue] = Intake(line, queue, self._settings)
            return intake

    def is_drained(self, queue: str) -> bool:
        """Whether no message waits in a queue, as far as the broker tells, nor here."""
        try:
            return self.intake(queue).is_drained(may_get=queue not in self._counted)
        except ChannelLost as lost:
            if "in exclusive use" in lost.text:
                return not waiting(self.consuming.line(), queue)
            if lost.code != _RESOURCE_LOCKED:
                raise
            # It has a single active consumer: nobody may get single messages.
            self._counted.add(queue)
            return False

    def has(self, intake: Intake) -> bool:
        """Whether the intake is of this session, so that its deliveries can be acknowledged."""
        return not intake.is_over and intake in list(self._intakes.values())

    def close(self) -> None:
        """Close both connections; the broker requeues what is not acknowledged."""
        self.closed.set()
        self.consuming.close()
        self.publisher.close()
