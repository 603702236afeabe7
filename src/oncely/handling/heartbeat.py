"""The heartbeat: extends claims while their messages are being handled, on a thread of its own."""

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from oncely.core.commands import Fenced
from oncely.core.errors import OncelyError
from oncely.core.record import Claim, Key
from oncely.ledger import Ledger

_log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 3

_Name = tuple[Key, int, int]


class Heartbeat:
    """Extends the claims that it holds, three times in each lease, until they are let go.

    `lease_s` is the length of every claim held; None needs no extending. The thread starts with
    the first claim held, also again in a forked child, and ends with the process or with `stop`.
    """

    def __init__(self, ledger: Ledger, lease_s: float | None) -> None:
        self._ledger = ledger
        self._lease_s = lease_s
        # Reentrant: a claim may be let go by who is collected as garbage in the midst of this.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._held: dict[_Name, tuple[Claim, float]] = {}
        """Each with `time.monotonic()` when it is not surely live any more."""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, claims: Iterable[Claim], asked_at: float) -> None:
        """Extend these from now on. `asked_at`: `time.monotonic()` before they were asked for."""
        if self._lease_s is None:
            return
        self._leave_claims_to_parent()
        good_until = asked_at + self._lease_s
        with self._lock:
            for claim in claims:
                self._held[_name(claim)] = claim, good_until
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._beat, args=[self._lease_s], name="oncely-heartbeat", daemon=True
                )
                self._thread.start()

    def _leave_claims_to_parent(self) -> None:
        """In a forked child: what was held when it was forked is not its own to extend."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._lock = threading.RLock()
            self._held.clear()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def let_go(self, claim: Claim) -> Claim:
        """Stop extending; return the claim as it was last extended."""
        return self.let_go_many([claim])[0]

    def let_go_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """The same for each of these."""
        with self._lock:
            return [self._held.pop(_name(claim), (claim,))[0] for claim in claims]

    def is_good(self, claim: Claim) -> bool:
        """Whether the claim is surely still live.

        By this process's own monotonic clock, counted from before each exchange with the store:
        it errs on the early side.
        """
        if self._lease_s is None:
            return True
        held = self._held.get(_name(claim))
        return held is not None and time.monotonic() < held[1]

    def _beat(self, lease_s: float) -> None:
        while not self._stopped.wait(lease_s / _BEATS_PER_LEASE):
            try:
                self._extend_all(lease_s)
            except OncelyError:
                # The next beat tries again; what runs out meanwhile is not good any more.
                _log.warning("extending_failed", exc_info=True)

    def _extend_all(self, lease_s: float) -> None:
        with self._lock:
            claims = [claim for claim, _ in self._held.values()]
        if not claims:
            return
        asked_at = time.monotonic()
        outcomes = self._ledger.extend_many(claims, timedelta(seconds=lease_s))
        with self._lock:
            for claim, outcome in zip(claims, outcomes, strict=True):
                name = _name(claim)
                if name not in self._held or self._held[name][0] is not claim:
                    continue
                if isinstance(outcome, Fenced):
                    del self._held[name]
                    _log.warning("claim_lost", extra={"fence": claim.fence})
                elif outcome.record is not None:
                    extended = claim._replace(record=outcome.record)
                    self._held[name] = extended, asked_at + lease_s


def shared_heartbeat(ledger: Ledger, lease_s: float | None) -> Heartbeat:
    """The heartbeat of all claims of `ledger` that last so long: one thread for any number."""
    shared: Heartbeat = ledger.shared.setdefault((Heartbeat, lease_s), Heartbeat(ledger, lease_s))
    return shared


def _name(claim: Claim) -> _Name:
    # Not by its key alone: whoever lost a claim to another thread is not to let go of that one's.
    record = claim.record
    return record.key, record.fence, record.birth
