"""Waiting for messages: those of this process are noticed at once; for those of others, the store
is polled, or its database notifies.
"""

import math
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from oncely._util.clock import monotonic
from oncely._util.forking import afresh_in_children

_LOOK_WHILE_HEARING_S = 1.0
"""How often to poll where the database notifies: a notification may be lost."""
_BUSY_S = 1.0
"""How long after a notification to poll as if there were none: in a burst, not every message is
notified.
"""


class Bell:
    """Rings in one process when messages may have come to some tables."""

    def __init__(self) -> None:
        self.rung = 0
        """How often it has rung."""
        self.rung_at = -math.inf
        """`clock.monotonic()` when it last rang."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the lock to the parent: called in a forked child."""
        self._changed = threading.Condition()

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self.rung += 1
            self.rung_at = monotonic()
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """How often it has rung; returns as soon as that differs from `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self.rung != seen, timeout_s)
            return self.rung


_bells: "WeakValueDictionary[object, Bell]" = WeakValueDictionary()
_making = threading.Lock()


def bell_at(place: object) -> Bell:
    """The bell of all stores of this process in one place."""
    with _making:
        bell = _bells.get(place)
        if bell is None:
            bell = _bells[place] = Bell()
        return bell


class Hearing(Protocol):
    """Receives a database's notifications that messages have come."""

    is_heard: bool
    """Whether notifications would be received now."""

    def begin(self) -> None:
        """Receive from now on, for as long as this is called now and then."""

    def close(self) -> None:
        """Stop receiving, until `begin` is called again."""

    def start_afresh(self) -> None:
        """Leave the connection to the parent: called in a forked child."""


class News:
    """Tells when messages may have come: from this process and, by notifications, from others."""

    def __init__(self, bell: Bell, look_s: float, hearing: Hearing | None = None) -> None:
        self._bell = bell
        self._look_s = look_s
        self._hearing = hearing

    @property
    def rung(self) -> int:
        """How often the bell has rung so far."""
        return self._bell.rung

    @property
    def look_s(self) -> float:
        """How long to wait at most before the next poll."""
        is_heard = self._hearing is not None and self._hearing.is_heard
        is_quiet = monotonic() - self._bell.rung_at > _BUSY_S
        return _LOOK_WHILE_HEARING_S if is_heard and is_quiet else self._look_s

    def tell(self) -> None:
        """Messages have come: wake those who wait."""
        self._bell.ring()

    def wait(self, seen: int, timeout_s: float) -> int:
        """`rung`, as soon as it differs from `seen`, or it is time to poll."""
        if self._hearing is not None:
            self._hearing.begin()
        return self._bell.wait(seen, min(timeout_s, self.look_s))

    def close(self) -> None:
        """Stop receiving notifications, until somebody waits again."""
        if self._hearing is not None:
            self._hearing.close()

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        if self._hearing is not None:
            self._hearing.start_afresh()


class Looking:
    """Polls the newest number, and reads it whenever there is news."""

    def __init__(self, newest: Callable[[], int], news: News) -> None:
        self._newest = newest
        self._news = news
        self._seen = 0

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is a message that was not there in the last wait."""
        deadline = monotonic() + timeout_s
        told = now_told = self._news.rung
        while True:
            newest, seen = self._newest(), self._seen
            self._seen = newest
            left_s = deadline - monotonic()
            if newest > seen or now_told != told or left_s <= 0:
                return
            now_told = self._news.wait(told, left_s)
