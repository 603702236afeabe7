"""Messages that are delayed: whoever receives from a queue holds them until they are due.

The broker is not asked to bring them back: it does that only when nothing befalls it meanwhile.
"""

import time
from contextlib import suppress
from dataclasses import replace
from heapq import heapify, heappop, heappush
from threading import Lock
from typing import NamedTuple

from oncely.core.verdicts import Delay
from oncely.transports.rabbitmq.bell import Bell
from oncely.transports.rabbitmq.connection import Line
from oncely.transports.rabbitmq.intake import Arrival, Intake, Terms
from oncely.transports.rabbitmq.messages import delay_of
from oncely.transports.transport import Delivery

_HELD_S = 600.0
"""What is held for longer goes to the end of its queue: well before RabbitMQ's own timeout, half an
hour, after which it would take all back.
"""
_HELD_IN_A_THRONG_S = 10.0
"""The same where there may be more than can be held, and some of those may be due."""

_MOST = 2_000
"""Of one length: they are in memory, maybe for hours."""


class _Held(NamedTuple):
    """What is not due yet. Of two the one that is due first is the lesser."""

    due: float
    since: float
    arrival: Arrival


class DelayIntake(Intake):
    """An intake of what is delayed in a queue; delivers each when it is due, as of `name`."""

    # Whoever deletes queues at work, and makes them again, does so to those that have messages.
    quiet_s = 60.0

    def __init__(
        self, line: Line, queue: str, terms: Terms, bell: Bell, wanted: int, *, name: str
    ) -> None:
        self._name = name
        self._lock = Lock()
        self._held: list[_Held] = []
        super().__init__(line, queue, terms, bell, wanted)

    def taken(self, limit: int) -> list[Delivery]:
        taken: list[Delivery] = []
        with self._lock:
            if self._arrivals:
                self._sort_in()
            now = time.monotonic()
            while self._held and self._held[0].due <= now and len(taken) < limit:
                taken.append(self._delivery(heappop(self._held).arrival, self._name))
        return taken

    def rest_s(self) -> float:
        with self._lock:
            due_s = self._held[0].due - time.monotonic() if self._held else self.quiet_s
        return max(0.0, min(due_s, super().rest_s()))

    def passed_on(self) -> list[tuple[Delivery, Delay]]:
        """What was held for long, and for how much longer it is delayed: to settle it so puts it
        behind all that wait. It is not held here any more.
        """
        now = time.monotonic()
        since = now - (_HELD_IN_A_THRONG_S if self._has_enough else _HELD_S)
        with self._lock:
            leaving = [held for held in self._held if held.since < since and held.due > now]
            self._held = [held for held in self._held if held.since >= since or held.due <= now]
            heapify(self._held)
        return [(self._untouched(held), Delay(held.due - now)) for held in leaving]

    def lost(self) -> None:
        super().lost()
        with self._lock:
            self._held.clear()

    def _next_share(self) -> int:
        # However few are asked for, what is due first may be behind many others.
        return min(self._terms.prefetch, _MOST)

    @property
    def _has_more(self) -> bool:
        return bool(self._held) or super()._has_more

    def _sort_in(self) -> None:
        # They may be cleared at any moment.
        with suppress(IndexError):
            while True:
                arrival, now = self._arrivals.popleft(), time.monotonic()
                due = now + delay_of(arrival.content.properties)
                heappush(self._held, _Held(due, now, arrival))

    def _untouched(self, held: _Held) -> Delivery:
        """As a delivery that was none: nobody was given it."""
        delivery = self._delivery(held.arrival, self._name)
        return replace(delivery, count=delivery.count - 1)
