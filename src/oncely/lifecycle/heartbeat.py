"""The heartbeat extends claims while their messages are being handled, on a thread of its own."""

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from operator import attrgetter
from typing import Any

from oncely._util import clock as process_clock
from oncely._util.event_log import EventLog
from oncely._util.forking import afresh_in_children
from oncely._util.outage import Outage
from oncely.core.commands import Fenced, Written
from oncely.core.errors import ContentionError, StoreUnavailable
from oncely.core.record import Claim, Key
from oncely.ledger.arguments import renewed
from oncely.ledger.ledger import Ledger

_log = EventLog(__name__)

_BEATS_PER_LEASE = 3
_identity = attrgetter("identity")
_LOOK_S = 5.0
"""How often to look at the store's clock between two beats."""
AWAY = (StoreUnavailable, ContentionError)
"""The errors of a store that may answer a later try."""
PAUSE_S = 0.2
"""Between two tries."""
ENDLESS_S = 60.0
"""How long to try where a claim has no end."""


class Heartbeat:
    """Extends the claims that it holds, three times in each lease, until they are let go.

    `lease_s` is the length of every claim held; None needs no extending. The thread starts with
    the first claim held, also again in a forked child and after `close`, and ends when nobody has
    the heartbeat any more. `clock` tells the time in seconds, as `time.monotonic` does. Where it
    `is_by_hand` there is no thread, and its owner calls `beat`.
    """

    def __init__(
        self,
        ledger: Ledger,
        lease_s: float | None,
        clock: Callable[[], float] = process_clock.monotonic,
        *,
        is_by_hand: bool = False,
    ) -> None:
        self._ledger = ledger
        self._lease_s = lease_s
        self._clock = clock
        self._is_by_hand = is_by_hand
        self._outage = Outage(
            _log,
            "lease_extension_failed",
            "leases cannot be extended: %(reason)s; trying again at each heartbeat until they "
            "run out",
            "lease_extension_recovered",
            "leases are extended again after %(away_s)s s",
        )
        self.start_afresh()
        afresh_in_children(self)

    def start_afresh(self) -> None:
        """Hold nothing: claims that were held at a fork are extended by the parent."""
        # Reentrant: an object that is collected as garbage while this runs may let go of a claim.
        self._lock = threading.RLock()
        self._held: dict[tuple[Key, int, int], tuple[Claim, float]] = {}
        """Each with the time from which it may have run out. Not by its key alone: a thread that
        lost its claim to another must not let go of the other's.
        """
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._ahead_s: float | None = None
        """How far the store's clock was ahead of this process's when it was last looked at."""

    def hold(self, claims: Iterable[Claim], asked_at: float) -> None:
        """Extend these from now on. `asked_at`: the clock before they were asked for."""
        if self._lease_s is None:
            return
        good_until = asked_at + self._lease_s
        with self._lock:
            for claim in claims:
                self._held[claim.identity] = claim, good_until
            is_beating = self._thread is not None and self._thread.is_alive()
            if is_beating or not self._held or self._is_by_hand:
                return
            self._closed = threading.Event()
            pause_s = self._lease_s / _BEATS_PER_LEASE
            thread = threading.Thread(
                target=_beat_until,
                args=[weakref.ref(self), self._closed, pause_s],
                name="oncely-heartbeat",
                daemon=True,
            )
            thread.start()
            # One that could not be started is not to be waited for.
            self._thread = thread

    def close(self) -> None:
        """End the thread, and wait for it. A claim that is held later starts another."""
        with self._lock:
            self._closed.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def let_go(self, claims: Sequence[Claim]) -> list[Claim]:
        """Stop extending these; return them as they were last extended."""
        with self._lock:
            return [self._held.pop(claim.identity, (claim,))[0] for claim in claims]

    def newest(self, claims: Sequence[Claim]) -> list[Claim]:
        """These as they were last extended, which goes on."""
        with self._lock:
            return [self._held.get(claim.identity, (claim,))[0] for claim in claims]

    def good_until(self, claims: Sequence[Claim]) -> float:
        """When the first of these that are held may run out, by this process's clock: infinity
        without a lease, minus infinity where none of them is held.
        """
        if self._lease_s is None:
            return math.inf
        with self._lock:
            held = [self._held[name] for name in map(_identity, claims) if name in self._held]
        return min((until for _, until in held), default=-math.inf)

    def is_good(self, claim: Claim) -> bool:
        """Whether the claim is surely still live.

        By this process's own clock, counted from before each exchange with the store: it errs on
        the early side.
        """
        if self._lease_s is None:
            return True
        held = self._held.get(claim.identity)
        return held is not None and self._clock() < held[1]

    def beat(self) -> None:
        """Extend what is held, once. An error is logged, and the next beat tries again; a claim
        that runs out before that is not good any more.
        """
        try:
            if self._lease_s is not None:
                self._extend_all(self._lease_s)
        except Exception as error:  # noqa: BLE001 - the claims are lost if nobody extends them.
            self._outage.met(error)

    def has_jumped(self) -> bool:
        """Whether the store's clock was set forward since this was last asked, so far that claims
        held here seem to have run out.
        """
        former, self._ahead_s = self._ahead_s, None
        if self._lease_s is None or not self._held:
            return False
        try:
            self._ahead_s = self._ledger.now_beside() - self._clock()
        except Exception:  # noqa: BLE001 - the next beat tells what is wrong.
            return False
        jump_s = 0.0 if former is None else self._ahead_s - former
        if jump_s < self._lease_s / _BEATS_PER_LEASE:
            return False
        _log.warning(
            "the store's clock was set forward by %(jump_s)s s: leases seem to have run out, and "
            "messages in work may run again; those of this process are extended now",
            extra={"event": "store_clock_jumped", "jump_s": round(jump_s, 1)},
        )
        return True

    def _extend_all(self, lease_s: float) -> None:
        with self._lock:
            claims = [claim for claim, _ in self._held.values()]
        if not claims:
            return
        asked_at = self._clock()
        outcomes = self._ledger.extend_each(claims, timedelta(seconds=lease_s))
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if errors:
            self._outage.met(errors[0])
        else:
            self._outage.over()
        lost = []
        with self._lock:
            for claim, outcome in zip(claims, outcomes, strict=True):
                name = claim.identity
                if name not in self._held or self._held[name][0] is not claim:
                    continue
                if isinstance(outcome, Fenced):
                    lost.append(claim)
                elif isinstance(outcome, Written):
                    self._held[name] = renewed(claim, outcome), asked_at + lease_s
        for claim in lost:
            self.lost(claim)

    def lost(self, claim: Claim) -> None:
        """A write under the claim was refused: log that once, at a beat or at the handler's end."""
        if self._held.pop(claim.identity, None) is not None:
            _log.warning(
                "the claim on message '%(message_id)s' of '%(consumer)s' is lost: its lease ran "
                "out and another worker has the message, or somebody has decided about it",
                extra={"event": "claim_lost", **claim.key._asdict(), "fence": claim.fence},
            )


def shared_heartbeat(ledger: Ledger, lease_s: float | None) -> Heartbeat:
    """The heartbeat of all claims of `ledger` that last so long: one thread for any number, which
    ends when the ledger is closed.
    """
    return ledger.keep((Heartbeat, lease_s), lambda: Heartbeat(ledger, lease_s))


def _beat_until(
    heartbeat: "weakref.ref[Heartbeat]", closed: threading.Event, pause_s: float
) -> None:
    looks = left = math.ceil(pause_s / _LOOK_S)
    while not process_clock.wait(closed, pause_s / looks):
        alive = heartbeat()
        if alive is None:
            return
        left -= 1
        if not left or alive.has_jumped():
            alive.beat()
            left = looks
        # While it waits, its thread keeps no ledger in memory.
        del alive


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
