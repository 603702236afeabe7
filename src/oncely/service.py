"""IdempotenceService: what a message bus asks before and after a message's handler runs."""

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Literal, cast

from oncely.claiming.inbox import Inbox
from oncely.claiming.inline import InlineCalls, run_inline
from oncely.core.commands import Busy, Duplicate, Exhausted, Granted, Handled, InDoubt, Mismatch
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import MessageError, RefusedError, TooOldError
from oncely.core.message import Message, check_id, check_message, fingerprint_of
from oncely.core.policy import Duration, Policy
from oncely.core.record import Claim, Key, State
from oncely.core.rules import is_final, retry_delay_s
from oncely.handling.around import Asked, Handling
from oncely.handling.heartbeat import Heartbeat
from oncely.handling.held_message import MOST_DEFERRED, HeldMessage
from oncely.ledger import Ledger

_MOST_NOTES = 10_000
"""Messages that were not assigned of which is remembered why; the oldest are forgotten."""


class ProcessingStatus(StrEnum):
    """What is to become of a delivery."""

    ASSIGNED = "assigned"
    """Its handler is to run."""
    IGNORE = "ignore"
    """Nothing is to run; what the broker is told depends on the reason."""
    MESSAGE_HANDLED = "message_handled"
    """Its handler has run; what it deferred may wait to be sent."""


Reason = Literal["completed", "busy", "in_doubt", "exhausted", "mismatch", "too_old"]

_REASONS: Mapping[type, Reason] = {
    Duplicate: "completed",
    Busy: "busy",
    InDoubt: "in_doubt",
    Exhausted: "exhausted",
    Mismatch: "mismatch",
}


@dataclass(slots=True)
class _Assigned:
    """A message whose handler runs now."""

    claim: Claim
    deferred: dict[tuple[str, str], DeferredMessage] = field(default_factory=dict)
    """By id and destination, in the order of sending."""


class IdempotenceService:
    """Which messages of one consumer are processed, and what their handlers have to send.

    `ledger` is a Ledger, or an Inbox: then all is a part of that transaction. `lease` replaces the
    policy's; it is extended from ASSIGNED until the message is said to be handled, completed or
    failed, and one of these has to be said. For any number of threads, outside a transaction.

    Every method raises MessageError for a message without a usable id, unless the policy finds
    another way, and StoreUnavailable when the store cannot be reached.
    """

    def __init__(
        self,
        ledger: Ledger | Inbox,
        consumer: str,
        lease: Duration | None = None,
        policy: Policy = Policy(),
    ) -> None:
        self._calls = ledger
        self._inline = InlineCalls(ledger)
        owner = cast(Ledger, ledger.ledger) if isinstance(ledger, Inbox) else ledger
        self._handling = Handling.under(owner, consumer, policy, lease)
        # Inside a transaction nothing can run while the store is away.
        is_joined = isinstance(ledger, Inbox)
        self._ask = self._handling.ask if is_joined else self._handling.ask_or_run
        self._lock = threading.Lock()
        self._assigned: dict[Key, _Assigned] = {}
        self._notes: dict[Key, Reason | Literal["untracked"]] = {}
        """What came of asking last, where that was no claim."""
        # A service that nobody has any more processes nothing: its claims are to run out.
        gone = weakref.finalize(self, _let_go_all, self._handling.heartbeat, self._assigned)
        gone.atexit = False

    # ---- Before the handler --------------------------------------------------------------------

    def processing_status(self, message: Message) -> ProcessingStatus:
        """What is to become of this delivery; ASSIGNED claims the message."""
        asked = _asked(message)
        key = self._handling.key_of(asked)
        if key in self._assigned:
            # Even where its lease has run out: the handler is still at it, in this process.
            return self._ignore(key, "busy")
        asked_at = time.monotonic()
        try:
            outcome = run_inline(self._ask(self._inline, asked))
        except TooOldError:
            return self._ignore(key, "too_old")
        match outcome:
            case None:
                self._handling.ledger.count_untracked(self._handling.consumer)
                self._note(key, "untracked")
                return ProcessingStatus.ASSIGNED
            case Granted(claim):
                self._assign(claim, asked_at)
                return ProcessingStatus.ASSIGNED
            case Handled():
                self._note(key, None)
                return ProcessingStatus.MESSAGE_HANDLED
            case _:
                return self._ignore(key, _REASONS[type(outcome)])

    def reason(self, message: Message) -> Reason | None:
        """Why the last status of the message was IGNORE; None where it was none.

        Only "completed" may be acknowledged as done.
        """
        key = self._handling.key_of(_asked(message))
        note = None if key is None else self._notes.get(key)
        return None if note == "untracked" else note

    # ---- While the handler runs ----------------------------------------------------------------

    def add_deferred_message(
        self, message: Message, deferred: Message, destination: str = ""
    ) -> None:
        """Keep `deferred` under the message being processed, until that is handled.

        Its id is kept; one id for one destination is kept once. Raises MessageError for an id that
        cannot be one and beyond the limit of one message, RefusedError where the handler of
        `message` does not run under a claim of this service.
        """
        key = self._tracked_key(message)
        check_message(deferred)
        if destination:
            check_id(destination, "destination")
        with self._lock:
            assigned = None if key is None else self._assigned.get(key)
            if key is None or assigned is None:
                raise RefusedError(
                    f"{message.id!r} is not being processed under a claim here, and can defer "
                    "nothing: send it at once"
                )
            position = len(assigned.deferred)
            if position >= MOST_DEFERRED:
                raise MessageError(f"a handler may send {MOST_DEFERRED:,} messages, and no more")
            kept = DeferredMessage(deferred.id, destination, deferred, key, position)
            assigned.deferred.setdefault((kept.id, destination), kept)

    # ---- When the handler has ended ------------------------------------------------------------

    def message_handled(self, message: Message) -> None:
        """The handler has succeeded; what it deferred is stored with that, or nothing is.

        To say it again is no error. Raises FencedError where another worker took the message over
        meanwhile, RefusedError where its handler does not run here.
        """
        key = self._tracked_key(message)
        if key is None:
            return
        assigned = self._let_go(key)
        if assigned is not None:
            self._store_handled(assigned)
        elif self._state(key) not in (State.HANDLED, State.COMPLETED):
            raise RefusedError(f"{message.id!r} is not being processed here: ask for its status")

    def get_deferred_messages(self, message: Message) -> Sequence[DeferredMessage]:
        """What is still to be sent, in the order of sending."""
        key = self._tracked_key(message)
        if key is None:
            return []
        with self._lock:
            if key in self._assigned:
                return list(self._assigned[key].deferred.values())
        return self._calls.deferred(key)

    def deferred_message_sent(self, message: Message, deferred: DeferredMessage) -> None:
        """It is sent, and waits no more; after the last one the message is completed.

        To say it again is no error. Raises RefusedError where the message is not handled yet, and
        for what another one deferred.
        """
        key = self._tracked_key(message)
        if key is None or deferred.parent != key:
            raise RefusedError(f"{deferred.id!r} was not deferred by {message.id!r}")
        if key in self._assigned:
            raise RefusedError(f"{message.id!r} is not handled yet: nothing may be sent before")
        waits = [deferred]
        if deferred.number is None:
            # It was asked for before it was stored.
            waits = [one for one in self._calls.deferred(key) if one.name == deferred.name]
        self._calls.sent(waits)

    def processing_completed(self, message: Message) -> None:
        """Nothing is left to do; what was not said to be handled is handled first.

        To say it again is no error. Raises RefusedError where deferred messages still wait, or the
        handler has not succeeded, FencedError where another worker took the message over.
        """
        key = self._tracked_key(message)
        if key is None:
            self._note(self._handling.key_of(_asked(message)), None)
            return
        assigned = self._let_go(key)
        if assigned is not None and not assigned.deferred:
            self._calls.complete(assigned.claim)
            return
        if assigned is not None:
            self._store_handled(assigned)
        self._calls.finish([key])
        if self._state(key) is not State.COMPLETED:
            waiting = len(self._calls.deferred(key))
            why = (
                f"of what it deferred, {waiting} wait to be sent"
                if waiting
                else "it is not handled"
            )
            raise RefusedError(f"{message.id!r} cannot be completed: {why}")

    def processing_failed(self, message: Message, error: BaseException) -> timedelta | None:
        """The handler has failed, or what came after it; what was not stored is dropped.

        Returns after how long the message is to be delivered again; None when no further attempt
        is granted, and it belongs into the error queue. A handler that was stopped, by an error
        that is no Exception, has not failed: its claim is given back. What goes wrong in recording
        that is logged; the claim runs out then.
        """
        policy = self._handling.policy
        key = self._tracked_key(message)
        assigned = None if key is None else self._let_go(key)
        if assigned is None:
            self._note(self._handling.key_of(_asked(message)), None)
        else:
            held = HeldMessage(assigned.claim, self._inline)
            run_inline(self._handling.end_badly(held, error))
        if not isinstance(error, Exception):
            return timedelta(0)
        attempts = assigned.claim.attempts if assigned else 1
        if assigned is not None and is_final(policy, attempts, error):
            return None
        return timedelta(seconds=retry_delay_s(policy, attempts, error))

    # ---- What runs here ------------------------------------------------------------------------

    def _tracked_key(self, message: Message) -> Key | None:
        """None for a message that runs without a claim."""
        key = self._handling.key_of(_asked(message))
        return None if key is None or self._notes.get(key) == "untracked" else key

    def _assign(self, claim: Claim, asked_at: float) -> None:
        if not isinstance(self._calls, Inbox):
            self._handling.heartbeat.hold([claim], asked_at)
        self._note(claim.key, None)
        with self._lock:
            self._assigned[claim.key] = _Assigned(claim)

    def _let_go(self, key: Key) -> _Assigned | None:
        with self._lock:
            assigned = self._assigned.pop(key, None)
        if assigned is not None:
            assigned.claim = self._handling.heartbeat.let_go(assigned.claim)
        return assigned

    def _store_handled(self, assigned: _Assigned) -> None:
        self._calls.handled(assigned.claim, deferred=list(assigned.deferred.values()))

    def _state(self, key: Key) -> State | None:
        record = self._calls.find(key)
        return None if record is None else record.state

    def _ignore(self, key: Key | None, reason: Reason) -> ProcessingStatus:
        self._note(key, reason)
        return ProcessingStatus.IGNORE

    def _note(self, key: Key | None, note: Reason | Literal["untracked"] | None) -> None:
        if key is None:
            return
        with self._lock:
            self._notes.pop(key, None)
            if note is not None:
                self._notes[key] = note
            if len(self._notes) > _MOST_NOTES:
                del self._notes[next(iter(self._notes))]


def _let_go_all(heartbeat: Heartbeat, assigned: Mapping[Key, _Assigned]) -> None:
    for one in list(assigned.values()):
        heartbeat.let_go(one.claim)


def _asked(message: Message) -> Asked:
    return Asked(message.id, fingerprint_of(message.body), message)
