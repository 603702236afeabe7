"""Steadily: waits while the store is unavailable, for any time, and then goes on."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from oncely._util.outage import Outage
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY, PAUSE_S, store_outage
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.counts import Counts

T = TypeVar("T")


def steadily(
    ask: Callable[[], T],
    channel: TaskChannel,
    outage: Outage,
    counts: Counts,
    ledger: Ledger | None = None,
    until: float = math.inf,
) -> T:
    """Call `ask`, which is safe to repeat, until the store answers; return its result. With a
    `ledger`, `ask` may also raise drivers' errors of connections to the same database. Raises
    Stopped, and after `until` (monotonic) what `ask` raises.
    """
    while True:
        try:
            answer = ask()
        except Exception as error:
            is_passing = isinstance(error, AWAY) or (
                ledger is not None and (ledger.is_outage(error) or ledger.is_contention(error))
            )
            if not is_passing or time.monotonic() > until:
                raise
            outage.met(error)
        else:
            outage.over()
            return answer
        channel.wait(time.monotonic() + PAUSE_S, counts)


def patiently(ask: Callable[[], T], consumer: str) -> T:
    """As `steadily`, if nothing can tell it to stop."""
    return steadily(ask, TaskChannel(None, ""), store_outage(consumer=consumer), Counts())
