"""What a transport has open: its two connections, and what it consumes through one of them."""

import os
import threading

from pika.connection import Parameters

from oncely.transports.rabbitmq.connection import Reach
from oncely.transports.rabbitmq.consuming import Intake
from oncely.transports.rabbitmq.publishing import Publisher
from oncely.transports.rabbitmq.topology import Queue, declare


class Session:
    """The connections of one process, until they are closed."""

    def __init__(
        self, parameters: Parameters, prefetch: int, confirm_s: float, *, counts: bool
    ) -> None:
        self.pid = os.getpid()
        self.consuming = Reach(parameters)
        """Whatever happens to publishers, this one goes on."""
        self._publishing = Reach(parameters, confirm_s)
        self._prefetch = prefetch
        self._counts = counts
        self.closed = threading.Event()
        """Set as soon as nothing of it is of use any more."""
        self._intakes_lock = threading.Lock()
        self._intakes: dict[str, Intake] = {}
        self._publisher_lock = threading.Lock()
        self._publisher: Publisher | None = None

    def intake(self, queue: Queue, until: float) -> Intake:
        """That of a queue; opened where there is none, with as many tries as there is time for."""
        with self._intakes_lock:
            intake = self.current(queue.name)
            if intake is None:
                line = self.consuming.line(until)
                declare(line, queue)
                intake = Intake(line, queue.name, self._prefetch, counts=self._counts)
                self._intakes[queue.name] = intake
            return intake

    def current(self, queue: str) -> Intake | None:
        """That of a queue, where there is one that is not over."""
        intake = self._intakes.get(queue)
        return None if intake is None or intake.is_over else intake

    def has(self, intake: Intake) -> bool:
        """Whether it is one of these, and what it has delivered can be settled."""
        return not intake.is_over and intake in self._intakes.values()

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
        self.consuming.close()
        self._publishing.close()
