"""Waiting for messages: this process tells at once; what others keep is looked for, or heard of."""

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol
from weakref import WeakValueDictionary

from oncely._util.forking import afresh_in_children

_LOOK_WHILE_HEARING_S = 1.0
"""How often it is looked where the database tells: what is told may be lost."""
_BUSY_S = 1.0
"""For how long it is looked as where nothing is told, after something was: of what comes in a burst
not all is told.
"""


class Bell:
    """Rings in one process when messages may have come to some tables."""

    def __init__(self) -> None:
        self.rung = 0
        """How often it has."""
        self.rung_at = -math.inf
        """`time.monotonic()` when it has last."""
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Leave the lock to the parent: called in a forked child."""
        self._changed = threading.Condition()

    def ring(self) -> None:
        """Wake whoever waits."""
        with self._changed:
            self.rung += 1
            self.rung_at = time.monotonic()
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> int:
        """How often it has rung: returns as soon as that is not as often as was `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self.rung != seen, timeout_s)
            return self.rung


_bells: "WeakValueDictionary[object, Bell]" = WeakValueDictionary()
_making = threading.Lock()


def bell_at(place: object) -> Bell:
    """The one for all stores of this process in one place."""
    with _making:
        bell = _bells.get(place)
        if bell is None:
            bell = _bells[place] = Bell()
        return bell


class Hearing(Protocol):
    """What hears from a database that messages have come."""

    is_heard: bool
    """Whether it would, now."""

    def begin(self) -> None:
        """Hear from now on, for as long as this is called now and then."""

    def close(self) -> None:
        """Hear no more, until it is begun again."""

    def start_afresh(self) -> None:
        """Leave the connection to the parent: called in a forked child."""


class News:
    """Tells that messages may have come, from this process and, where they are heard, others."""

    def __init__(self, bell: Bell, look_s: float, hearing: Hearing | None = None) -> None:
        self._bell = bell
        self._look_s = look_s
        self._hearing = hearing

    @property
    def rung(self) -> int:
        """How often it was told so far."""
        return self._bell.rung

    @property
    def look_s(self) -> float:
        """After how long whoever waits is to look nevertheless."""
        is_heard = self._hearing is not None and self._hearing.is_heard
        is_quiet = time.monotonic() - self._bell.rung_at > _BUSY_S
        return _LOOK_WHILE_HEARING_S if is_heard and is_quiet else self._look_s

    def tell(self) -> None:
        """Something has come."""
        self._bell.ring()

    def wait(self, seen: int, timeout_s: float) -> int:
        """`rung`: as soon as that is not what was `seen`, or it is time to look."""
        if self._hearing is not None:
            self._hearing.begin()
        return self._bell.wait(seen, min(timeout_s, self.look_s))

    def close(self) -> None:
        """Hear no more, until somebody waits again."""
        if self._hearing is not None:
            self._hearing.close()

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        if self._hearing is not None:
            self._hearing.start_afresh()


class Looking:
    """Looks at the newest number again and again, and whenever there is news."""

    def __init__(self, newest: Callable[[], int], news: News) -> None:
        self._newest = newest
        self._news = news
        self._seen = 0

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is anything that was not there in the last wait."""
        deadline = time.monotonic() + timeout_s
        told = now_told = self._news.rung
        while True:
            newest, seen = self._newest(), self._seen
            self._seen = newest
            left_s = deadline - time.monotonic()
            if newest > seen or now_told != told or left_s <= 0:
                return
            now_told = self._news.wait(told, left_s)
