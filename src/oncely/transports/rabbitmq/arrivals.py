"""All that comes to the receivers of one queue: what is published to it, and what is delayed."""

import time
from collections.abc import Callable, Iterator
from functools import partial

from oncely.core.verdicts import Delay
from oncely.transports.rabbitmq.bell import Bell
from oncely.transports.rabbitmq.connection import Line
from oncely.transports.rabbitmq.delaying import DelayIntake
from oncely.transports.rabbitmq.intake import Intake, Terms
from oncely.transports.rabbitmq.topology import Queue, Topology, declare
from oncely.transports.transport import Delivery

_LOOK_AGAIN_S = 1.0
"""How often is looked for what was held for long."""


class Arrivals:
    """The intakes of one queue, and the bell that all of them ring."""

    def __init__(self, name: str, topology: Topology, terms: Terms) -> None:
        delays: Callable[..., Intake] = partial(DelayIntake, name=name)
        # What is due is taken before what has just come.
        self._sources: list[tuple[Queue, Callable[..., Intake]]] = [
            *((queue, delays) for queue in topology.delays(name)),
            (topology.main(name), Intake),
        ]
        self._dead = topology.dead(name)
        self._terms = terms
        self._bell = Bell()
        self._by_queue: dict[str, Intake] = {}
        self._look_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether something can come out of each of its queues."""
        return len(self.intakes) == len(self._sources)

    @property
    def intakes(self) -> list[Intake]:
        """Those that are not over."""
        return [intake for intake in list(self._by_queue.values()) if not intake.is_over]

    def open(self, line: Line, wanted: int) -> None:
        """See to it that it is open, by one caller at a time, who wants so many at a time."""
        # Long before there is a dead letter: a node that is killed within a second after a quorum
        # queue was made forgets all that it has confirmed there.
        declare(line, self._dead)
        for queue, new in self._sources:
            intake = self._by_queue.get(queue.name)
            if intake is None or intake.is_over:
                declare(line, queue)
                self._by_queue[queue.name] = new(line, queue.name, self._terms, self._bell, wanted)

    def take(self, limit: int, until: float) -> list[Delivery]:
        """What has come or is due, at most so many; waits until that moment, or until something
        else is to be seen to.
        """
        until = min(until, self._look_at)
        while not (taken := self._taken(limit)):
            with self._bell.heard():
                for intake in self.intakes:
                    intake.see_to_it_that_something_can_come()
                if time.monotonic() >= until or not self.is_open:
                    break
                self._bell.wait(lambda: self._rest_s(until))
        return taken

    def passed_on(self) -> Iterator[tuple[Intake, list[tuple[Delivery, Delay]]]]:
        """What is to be settled so, since it was held for long without being due."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_AGAIN_S
        for intake in self.intakes:
            if isinstance(intake, DelayIntake) and (pairs := intake.passed_on()):
                yield intake, pairs

    def holds_any(self) -> bool:
        """Whether anything is not settled that the broker has delivered. If not, nothing comes any
        more until somebody receives.
        """
        return any(intake.holds_any() for intake in self.intakes)

    def _taken(self, limit: int) -> list[Delivery]:
        taken: list[Delivery] = []
        for intake in self._by_queue.values():
            taken += intake.taken(limit - len(taken))
        return taken

    def _rest_s(self, until: float) -> float:
        rests_s = (intake.rest_s() for intake in self._by_queue.values())
        return max(0.0, min(until - time.monotonic(), *rests_s))
