"""ClaimKeeper: what keeps claims until the ends of their messages are stored."""

import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from oncely._util import clock
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely.core.errors import ContentionError, StoreUnavailable
from oncely.core.record import Claim
from oncely.ledger.driver import Driver
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


class ClaimKeeper:
    """Keeps claims: `heartbeat` extends them while their handlers run, and what is written about
    messages that ran is tried again until their leases are over.

    While the store is away, that is noted in `outage`. A process that `stop` stops has `grace_s`
    seconds left then.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        outage: Outage,
        stop: threading.Event | None = None,
        grace_s: float = math.inf,
    ) -> None:
        self._heartbeat = heartbeat
        self._outage = outage
        self._stop = stop
        self._grace_s = grace_s
        self._stopped_by = math.inf
        """When the grace is over."""

    def is_good(self, claim: Claim) -> bool:
        """Whether the claim is surely still live."""
        return self._heartbeat.is_good(claim)

    async def retried(
        self, driver: Driver, claims: Sequence[Claim], attempt: Callable[[], Awaitable[T]]
    ) -> T:
        """What `attempt` returns, as soon as the store answers.

        Raises StoreUnavailable or ContentionError when the claims run out before that, by this
        process's clock. Of several claims it raises ContentionError at once: the others must not
        wait for the contended one.
        """
        away = AWAY if len(claims) == 1 else AWAY[:1]
        tries_until = None
        while True:
            try:
                answer = await attempt()
            except away as error:
                tries_until = tries_until or clock.monotonic() + ENDLESS_S
                until = self._heartbeat.good_until(claims)
                if not self._may_wait(tries_until if until == math.inf else until):
                    raise
                if isinstance(error, StoreUnavailable):
                    # A record that is contended keeps no other from being written.
                    self._outage.met(error, "ends")
            else:
                self._outage.over("ends")
                return answer
            await driver.pause(PAUSE_S)

    def _may_wait(self, until: float) -> bool:
        now = clock.monotonic()
        if self._stop is not None and self._stop.is_set():
            self._stopped_by = min(self._stopped_by, now + self._grace_s)
        return now + PAUSE_S < min(until, self._stopped_by)
