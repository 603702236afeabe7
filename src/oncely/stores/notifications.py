"""Waiting for messages: those of this process are noticed at once; for those of others, the store
is polled, or its database notifies.
"""

import math
import threading
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children

if TYPE_CHECKING:
    from oncely.stores.sql.postgresql_listener import PostgresqlListener

_LOOK_WHILE_HEARING_S = 1.0
"""How often to poll where the database notifies: a notification may be lost."""
_BUSY_S = 1.0
"""How long after a notification to poll as if there were none: in a burst, not every message is
notified.
"""


class ProcessSignal:
    """An in-process event: new messages may be waiting in some tables."""

    def __init__(self) -> None:
        self.count = 0
        """How often it was sent."""
        self.sent_at = -math.inf
        """`clock.monotonic()` when it was last sent."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the lock to the parent: called in a forked child."""
        # Of C, and entered by itself: what a signal handler raises while a condition is entered,
        # which is Python, would leave that taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def send(self) -> None:
        """Wake whoever waits."""
        with self._lock:
            self.count += 1
            self.sent_at = monotonic()
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """How often it was sent; returns as soon as that differs from `seen`."""
        with self._lock:
            self._changed.wait_for(lambda: self.count != seen, timeout_s)
            return self.count


_signals: "WeakValueDictionary[object, ProcessSignal]" = WeakValueDictionary()
_making = threading.Lock()


def signal_in(database: object) -> ProcessSignal:
    """The signal of all stores of this process in one database."""
    with _making:
        signal = _signals.get(database)
        if signal is None:
            signal = _signals[database] = ProcessSignal()
        return signal


class Notifications:
    """Tells when messages may have come: from this process and, by notifications, from others."""

    def __init__(
        self, signal: ProcessSignal, poll_s: float, hearing: "PostgresqlListener | None" = None
    ) -> None:
        self.signal = signal
        self._poll_s = poll_s
        self._hearing = hearing

    @property
    def poll_s(self) -> float:
        """How long to wait at most before the next poll."""
        is_listening = self._hearing is not None and self._hearing.is_listening
        is_quiet = monotonic() - self.signal.sent_at > _BUSY_S
        return _LOOK_WHILE_HEARING_S if is_listening and is_quiet else self._poll_s

    def wait(self, seen: int, timeout_s: float) -> int:
        """How often the signal was sent: when that differs from `seen`, or it is time to poll."""
        if self._hearing is not None:
            self._hearing.begin()
        return self.signal.wait(seen, min(timeout_s, self.poll_s))

    def close(self) -> None:
        """Stop receiving notifications, until somebody waits again."""
        if self._hearing is not None:
            self._hearing.close()

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        if self._hearing is not None:
            self._hearing.start_afresh()
