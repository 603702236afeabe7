"""Relay: sends deferred messages, each after the handler that deferred it has succeeded."""

import logging
import random
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from oncely.core.errors import (
    ConfigError,
    ContentionError,
    StoreUnavailable,
    TransportError,
)
from oncely.core.policy import Duration, Policy, seconds
from oncely.core.record import Key, State
from oncely.ledger import Ledger
from oncely.sending import Means, Observer, OnProgress, Report, Sending
from oncely.transports.base import Clock, Transport

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
"""Between two tries while the broker or the store is away."""
_SLICE_S = 0.5
"""How long a wait for messages may keep a stop waiting."""
_LOOK_S = 1.0
"""How often it looks while messages wait that cannot be sent yet: nobody says when they can."""
_TIDY_EVERY_S = 300.0
_TIDY_AGE = timedelta(minutes=1)
_TIDY_MOST = 10_000
"""Records that tidying looks at; what is left comes the next time."""
_TIDY_BATCH = 100


class Relay:
    """Sends what waits in `ledger` through `transport`, at least once and under the same ids.

    It takes `batch` messages at a time; nobody else is given them for the time of `hold`. Those of
    one lane (see DeferredMessage) are published one after another, each when the one before is
    confirmed: a batch of a single lane takes as many exchanges with the broker as it has messages.
    When the hold is over, nothing more of the batch is published; what is being published at that
    moment, another relay may publish too. So choose a hold that outlasts a batch, or a batch that
    is through long before. What a dead relay held waits until the hold is over.

    A message that the transport refuses is tried again after the delays of `backoff`, the last of
    which repeats, and is set aside after `tries`. Until then the others of its lane wait for it,
    those of other lanes do not. While the broker is away no try is counted.

    Any number of relays may serve one ledger, in threads, processes and machines; one relay may
    be used by several threads. It looks for messages when the store wakes it, and every
    `poll`. Raises ConfigError for settings that cannot be meant.
    """

    def __init__(
        self,
        ledger: Ledger,
        transport: Transport,
        *,
        batch: int = 100,
        hold: Duration = "30s",
        tries: int = 10,
        backoff: Sequence[Duration] | Duration = ("30s", "2m", "5m"),
        poll: Duration = "1s",
        metrics: Observer | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        if type(batch) is not int or batch < 1:
            raise ConfigError(f"batch: {batch!r} is no whole number of 1 or more")
        hold_s = seconds(hold, "hold")
        if not hold_s:
            raise ConfigError('hold: a hold of zero holds nothing; write "30s"')
        self._poll_s = seconds(poll, "poll")
        if not self._poll_s:
            raise ConfigError('poll: zero would look for messages without a rest; write "1s"')
        retries = Policy(tries=tries, backoff=backoff)
        self._ledger = ledger
        self._means = Means(ledger, transport, batch, hold_s, retries, metrics, clock)

    def send_waiting(self, parents: Sequence[Key] | None = None) -> Report:
        """Send until nothing more can be taken; of these `parents` alone, where any are named.

        What has a delay or was refused goes on waiting. Raises TransportError when the broker is
        away: what it has confirmed is marked, what else was taken waits until the hold is over.
        """
        sending = Sending(self._means, threading.Event(), parents)
        sending.go_on()
        return sending.report

    def drain(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> Report:
        """As `send_waiting`, for all that waits, until `stop` is set; all published is marked.

        Messages whose handlers have succeeded and of which nothing waits are completed, too.
        `on_progress` is told after each batch.
        """
        sending = Sending(self._means, stop, on_progress=on_progress)
        sending.go_on()
        self._tidy(stop)
        return sending.report

    def run(self, stop: threading.Event, on_progress: OnProgress = lambda _: None) -> Report:
        """Send what waits and what comes, until `stop` is set; all that is published is marked.

        Tidies as `drain` does, on start and every few minutes. While the broker or the store is
        away it tries again, ever more slowly. `on_progress` is told after each batch, and whenever
        the relay has looked for messages.
        """
        sending = Sending(self._means, stop, on_progress=on_progress)
        tidy_at = 0.0
        failures = 0
        while not stop.is_set():
            try:
                if time.monotonic() >= tidy_at:
                    self._tidy(stop)
                    tidy_at = time.monotonic() + _TIDY_EVERY_S
                sending.go_on()
                failures = 0
                self._await_messages(stop)
            except (TransportError, StoreUnavailable, ContentionError) as error:
                failures += 1
                _log.warning("relay_cannot_go_on", exc_info=True)
                sending.tell(error)
                stop.wait(_pause_s(failures))
        sending.mark()
        return sending.report

    def _await_messages(self, stop: threading.Event) -> None:
        """Return when messages may be there, and when it is time to look, or to stop."""
        some_wait = self._ledger.backlog().waiting > 0
        rest_s = min(self._poll_s, _LOOK_S) if some_wait else self._poll_s
        look_at = time.monotonic() + rest_s
        woken = False
        while not woken and not stop.is_set() and (left_s := look_at - time.monotonic()) > 0:
            slice_s = min(left_s, _SLICE_S)
            asleep_at = time.monotonic()
            self._ledger.wait_for_deferred(timedelta(seconds=slice_s))
            woken = time.monotonic() - asleep_at < slice_s

    def _tidy(self, stop: threading.Event) -> None:
        """Complete what is handled and of which nothing waits: a worker died between the two."""
        handled = self._ledger.scan(state=State.HANDLED, older_than=_TIDY_AGE, limit=_TIDY_MOST)
        keys = [record.key for record in handled]
        for start in range(0, len(keys), _TIDY_BATCH):
            if stop.is_set():
                return
            self._ledger.finish(keys[start : start + _TIDY_BATCH])


def _pause_s(failures: int) -> float:
    # Many relays lost the broker at one moment: they should not all be back at one.
    return min(_LONGEST_PAUSE_S, 0.25 * (1 << min(failures, 10))) * random.uniform(0.5, 1.0)  # noqa: S311
