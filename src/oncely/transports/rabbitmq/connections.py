"""What a transport has open: its two connections, and what it consumes through one of them."""

import os
import threading
from contextlib import suppress

from pika.connection import Parameters

from oncely.core.errors import BrokerRefused, TransportError
from oncely.transports.rabbitmq.arrivals import Arrivals
from oncely.transports.rabbitmq.connection import Reach
from oncely.transports.rabbitmq.intake import Intake, Terms
from oncely.transports.rabbitmq.publishing import Publisher
from oncely.transports.rabbitmq.topology import Topology


class Session:
    """The connections of one process, until they are closed."""

    def __init__(
        self, parameters: Parameters, confirm_s: float, topology: Topology, terms: Terms
    ) -> None:
        self.pid = os.getpid()
        self.consuming = Reach(parameters)
        """Whatever happens to publishers, this one goes on."""
        self._publishing = Reach(parameters, confirm_s)
        self._topology = topology
        self._terms = terms
        self.closed = threading.Event()
        """Set as soon as nothing of it is of use any more."""
        self._inboxes_lock = threading.Lock()
        self._inboxes: dict[str, Arrivals] = {}
        self._publisher_lock = threading.Lock()
        self._publisher: Publisher | None = None

    def inbox(self, queue: str, wanted: int, until: float) -> Arrivals:
        """That of a queue; opened where it is not, with as many tries as there is time for, by a
        receiver that wants so many messages at a time.
        """
        with self._inboxes_lock:
            if queue not in self._inboxes:
                self._inboxes[queue] = Arrivals(queue, self._topology, self._terms)
            inbox = self._inboxes[queue]
            if not inbox.is_open:
                inbox.open(self.consuming.line(until), wanted)
            return inbox

    def holds_any(self, queue: str) -> bool:
        """Whether anything out of a queue, or delayed in it, is here and not settled."""
        return queue in self._inboxes and self._inboxes[queue].holds_any()

    def has(self, intake: Intake) -> bool:
        """Whether it is one of these, and what it has delivered can be settled."""
        return any(intake in inbox.intakes for inbox in list(self._inboxes.values()))

    def publisher(self) -> Publisher:
        """A channel that confirms."""
        with self._publisher_lock:
            line = self._publishing.line()
            if self._publisher is None or self._publisher.is_over:
                self._publisher = Publisher(line)
            return self._publisher

    def close(self) -> None:
        """Give everything back."""
        self.closed.set()
        for inbox in list(self._inboxes.values()):
            for intake in inbox.intakes:
                # Where the broker is lost it has taken back all the same.
                with suppress(TransportError, BrokerRefused):
                    intake.tell_all()
        self.consuming.close()
        self._publishing.close()
