"""Steadily: waits while the store is unavailable, for any time, and then goes on."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

from oncely._util.outage import Outage
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.heartbeat import AWAY, PAUSE_S, store_outage
from oncely.spark.sink.channel import TaskChannel

T = TypeVar("T")


def steadily(
    ask: Callable[[], T],
    channel: TaskChannel,
    outage: Outage,
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
        channel.wait(time.monotonic() + PAUSE_S)


def patiently(
    ask: Callable[[], T],
    consumer: str,
    channel: TaskChannel | None = None,
    most_s: float | None = None,
) -> T:
    """As `steadily`, at most for so many seconds; without a channel nothing can tell it to stop."""
    until = math.inf if most_s is None else time.monotonic() + most_s
    outage = store_outage(consumer=consumer)
    return steadily(ask, channel or TaskChannel(None, ""), outage, until=until)
