"""A dashboard as it was set up, for all who visit it."""

import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from oncely import ops
from oncely.core.message import Message
from oncely.core.policy import Probe
from oncely.ledger.ledger import Ledger
from oncely.web.access import Auth, FormTokens, TrustedProxies

Mask = Callable[[Message], Message]
"""Gives a message as people may see it, such as with another body."""
_FIRST_S = 5.0
"""For the first answer, while another request asks."""
Answer = TypeVar("Answer")
PROBLEMS_FOR_S = 60.0
"""`ops.problems` compares the whole schema."""
ACTIVITY_FOR_S = 10.0
"""`ops.activity` reads a day; processes tell of themselves no more often than that."""
PAGES_FOR_S = 1.0
"""Any page: many who look at the same time cost little more than one does."""
_PAGES = 32
"""So many pages are kept, each with at most a thousand rows."""


class Remembered(Generic[Answer]):
    """An answer that is asked for again only when it is old, however many look."""

    def __init__(self, ask: Callable[[], Answer], for_s: float) -> None:
        self._ask = ask
        self._for_s = for_s
        self._answer: tuple[float, Answer] | None = None
        self._asking = threading.Lock()

    def __call__(self) -> Answer:
        """The answer, at most twice so many seconds old, and as long as it takes to ask."""
        found = self._kept(self._for_s)
        if found is None:
            # One asks. The others take an answer that has just become old; where there is none they
            # wait, and ask if none comes.
            older = self._kept(2 * self._for_s)
            has_turn = self._asking.acquire(timeout=_FIRST_S if older is None else 0)
            try:
                found = self._kept(self._for_s) or (None if has_turn else older)
                if found is None:
                    answer = self._ask()
                    found = self._answer = (time.monotonic(), answer)
            finally:
                if has_turn:
                    self._asking.release()
        return found[1]

    def _kept(self, for_s: float) -> tuple[float, Answer] | None:
        """The answer, where it is not older than that."""
        found = self._answer
        is_kept = found is not None and time.monotonic() - found[0] <= for_s
        return found if is_kept else None


class SharedPages:
    """Pages as they were made just before, and what they have in common, for all who ask for the
    same.
    """

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._pages: dict[Hashable, Remembered[Any]] = {}
        self._changing = threading.Lock()

    def __call__(self, asked: Hashable, make: Callable[[], Answer], times: int = 1) -> Answer:
        """What was `asked` for: as `make` gives it, or gave it to somebody else, so many `times` as
        long ago as a page may be old.
        """
        with self._changing:
            page = self._pages.get(asked)
            if page is None:
                if len(self._pages) >= _PAGES:
                    del self._pages[next(iter(self._pages))]
                page = self._pages[asked] = Remembered(make, times * self._for_s)
        return cast("Answer", page())

    def forget(self) -> None:
        """Something was changed: whoever asks from now on is shown it."""
        with self._changing:
            # A page that is being made since before the change goes to those who wait for it alone.
            self._pages = {}


@dataclass(frozen=True, slots=True)
class Site:
    """What the pages are made from."""

    ledger: Ledger
    auth: Auth | None
    mask: Mask
    name: str
    """Which ledger it is, for people."""
    tokens: FormTokens
    hosts: Collection[str] | None
    """By which names it may be asked; None for any."""
    proxies: TrustedProxies
    """Which may say that a browser asks them over TLS."""
    probes: Mapping[str, Probe]
    """What finds out about messages in doubt, by consumer."""
    problems: Remembered[Sequence[str]]
    """What can lose or repeat messages."""
    activity: Remembered[ops.FoundActivity]
    """What went on in the last hour and day."""
    pages: SharedPages
    """Those that were made just before."""
