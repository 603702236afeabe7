"""What the programs that are killed work with: a ledger, a queue, and a time of their own."""

import time
from collections.abc import Callable, Mapping
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from oncely.core.policy import Policy, at_least_once, at_most_once, effectively_once
from oncely.ledger.ledger import Ledger
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery, Limits

JOINED = "effectively_once"
"""The mode in which handlers work in one transaction with their claims."""
BY_STEPS = "by_steps"
"""The mode in which an outside service is handed idempotency keys."""
POLICIES: Mapping[str, Callable[..., Policy]] = {
    "at_most_once": at_most_once,
    "at_least_once": at_least_once,
    JOINED: effectively_once,
    BY_STEPS: at_least_once,
}
"""By mode, which is also the consumer's name."""
LEASE = "60s"
VISIBILITY_S = 30.0
"""What a dead one has received comes again sooner than its lease is over: it is busy then."""
LATER_S = 40.0
"""When the next one comes."""


class Clock:
    """The time of a ledger and its queues, for all forks of this process: for none is it earlier
    than it was for those before.
    """

    def __init__(self) -> None:
        self._ahead_s = RawValue("d", 0.0)

    def pass_by(self, seconds: float) -> None:
        """Let it be later by so much."""
        self._ahead_s.value += seconds

    def __call__(self) -> float:
        return time.time() + float(self._ahead_s.value)


class Queue(StoreTransport):
    """A queue at which nobody waits: where nothing is ready, it is later already. Who only looks,
    because something is being handled, is told that there is nothing.
    """

    def __init__(self, file: Path, clock: Clock) -> None:
        super().__init__(SqlStore(sqlite_engine(file), clock=clock), Limits(VISIBILITY_S))
        self._now = clock

    def receive(self, queue: str, max_messages: int, wait_s: float) -> list[Delivery]:
        if not wait_s:
            return []
        taken = list(super().receive(queue, max_messages, 0.0))
        if not taken:
            self._now.pass_by(LATER_S)
        return taken


class Means(NamedTuple):
    """What a program works with."""

    mode: str
    policy: Policy
    ledger: Ledger
    engine: Engine
    """For handlers that work in one transaction with their claims."""
    queue: Queue
    log: Path
    """For effects outside the database."""
