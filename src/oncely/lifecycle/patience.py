"""Patience: a write about messages that ran is repeated until their leases are over."""

import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from oncely._util import clock
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import ContentionError, StoreUnavailable
from oncely.core.record import Claim
from oncely.engine.async_calls import AsyncCalls
from oncely.lifecycle.heartbeat import Heartbeat

T = TypeVar("T")

_log = EventLog(__name__)

AWAY = (StoreUnavailable, ContentionError)
"""The errors of a store that may answer a later try."""
PAUSE_S = 0.2
"""Between two tries."""
ENDLESS_S = 60.0
"""How long to try where a claim has no end."""


def store_outage(**values: Any) -> Outage:
    """An outage of the store; `values` are those of its events."""
    return Outage(
        _log,
        "store_unavailable",
        "the store cannot be reached: %(reason)s; trying again",
        "store_available",
        "the store can be reached again after %(away_s)s s",
        **values,
    )


class Patience:
    """The patience of a process that `stop` may stop: it has `grace_s` seconds left then. While
    the store is away, that is noted in `outage`.
    """

    def __init__(
        self,
        stop: threading.Event | None = None,
        grace_s: float = math.inf,
        outage: Outage | None = None,
    ) -> None:
        self.outage = outage or store_outage()
        self._stop = stop
        self._grace_s = grace_s
        self._stopped_by = math.inf
        """When the grace is over."""

    async def say(
        self,
        calls: AsyncCalls,
        speak: Callable[[], Awaitable[T]],
        good_until: Callable[[], float],
        *,
        is_one: bool = True,
    ) -> T:
        """What `speak` returns, as soon as the store answers.

        `good_until` tells when the claims that it is about run out, by this process's clock.
        Raises StoreUnavailable or ContentionError when that time is over. Unless it `is_one`
        message, it raises ContentionError at once: the others must not wait for the contended one.
        """
        away = AWAY if is_one else AWAY[:1]
        endless_until = clock.monotonic() + ENDLESS_S
        while True:
            try:
                said = await speak()
            except away as error:
                until = good_until()
                if not self._may_wait(endless_until if until == math.inf else until):
                    raise
                if isinstance(error, StoreUnavailable):
                    # A record that is contended keeps no other from being written.
                    self.outage.met(error, "ends")
            else:
                self.outage.over("ends")
                return said
            await calls.pause(PAUSE_S)

    def _may_wait(self, until: float) -> bool:
        now = clock.monotonic()
        if self._stop is not None and self._stop.is_set():
            self._stopped_by = min(self._stopped_by, now + self._grace_s)
        return now + PAUSE_S < min(until, self._stopped_by)


class Holding:
    """What keeps claims while their handlers run: the heartbeat extends them, patience stores."""

    def __init__(self, heartbeat: Heartbeat, patience: Patience) -> None:
        self._heartbeat = heartbeat
        self._patience = patience

    def is_good(self, claim: Claim) -> bool:
        """Whether the claim is surely still live."""
        return self._heartbeat.is_good(claim)

    async def say(self, calls: AsyncCalls, claim: Claim, speak: Callable[[], Awaitable[T]]) -> T:
        """As `Patience.say`, about that claim."""
        return await self._patience.say(calls, speak, lambda: self._heartbeat.good_until([claim]))
