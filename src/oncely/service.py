"""IdempotenceService: the calls of a message bus before and after a message's handler runs."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum
from typing import Literal, cast

from oncely.core.commands import Busy, Duplicate, Exhausted, Handled, InDoubt, Mismatch, TooOld
from oncely.core.durations import Duration
from oncely.core.errors import MessageError, RefusedError
from oncely.core.ids import check_id, fingerprint_of
from oncely.core.message import Message, check_message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, State
from oncely.core.turn import Turn, Untracked
from oncely.core.verdicts import DeadLetter, Delay, Ending
from oncely.core.waiting import WaitingMessage
from oncely.ledger.driver import SyncDriver, run_inline
from oncely.ledger.inbox import Inbox
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.handler_context import MOST_DEFERRED
from oncely.lifecycle.heartbeat import Heartbeat
from oncely.lifecycle.lifecycle import Lifecycle

_MOST_NOTES = 10_000
"""Messages that were not assigned whose reason is kept; the oldest are forgotten."""


class ProcessingStatus(StrEnum):
    """What to do with a delivery."""

    ASSIGNED = "assigned"
    """Run its handler."""
    IGNORE = "ignore"
    """Run nothing; whether to acknowledge it depends on the reason."""
    MESSAGE_HANDLED = "message_handled"
    """Its handler has succeeded; send the deferred messages that still wait."""


Reason = Literal["completed", "busy", "in_doubt", "exhausted", "mismatch", "too_old"]

_REASONS: Mapping[type, Reason] = {
    Duplicate: "completed",
    Busy: "busy",
    InDoubt: "in_doubt",
    Exhausted: "exhausted",
    Mismatch: "mismatch",
    TooOld: "too_old",
}


@dataclass(slots=True)
class _Assigned:
    """A message whose handler runs now."""

    turn: Turn
    claim: Claim
    deferred: dict[tuple[str, str], WaitingMessage] = field(default_factory=dict)
    """By id and destination, in the order of sending."""


class IdempotenceService:
    """Which messages of one consumer are processed, and what their handlers have to send.

    `ledger` is a Ledger, or an Inbox: then all calls are part of that transaction. `lease` replaces
    the policy's; it is extended from ASSIGNED until `message_handled`, `processing_completed` or
    `processing_failed`, one of which has to be called. Safe to share between threads, outside a
    transaction.

    Every method raises MessageError for a message without a usable id, unless `on_missing_id`
    allows it, and StoreUnavailable when the store cannot be reached.
    """

    def __init__(
        self,
        ledger: Ledger | Inbox,
        consumer: str,
        lease: Duration | None = None,
        policy: Policy = Policy(),
    ) -> None:
        self._calls = ledger
        self._driver = SyncDriver(ledger, is_joined=isinstance(ledger, Inbox))
        owner = cast(Ledger, ledger.ledger) if isinstance(ledger, Inbox) else ledger
        lifecycle = Lifecycle.under(owner, consumer, policy, lease)
        # The bus itself calls `processing_completed`.
        self._lifecycle = replace(lifecycle, finishes_handled=False)
        self._lock = threading.Lock()
        self._assigned: dict[Key, _Assigned] = {}
        self._notes: dict[Key, Reason | Literal["untracked"]] = {}
        """The reason of the last status, where that was not a claim."""
        # A service that is garbage processes nothing any more: its claims run out.
        gone = weakref.finalize(self, _let_go_all, self._lifecycle.heartbeat, self._assigned)
        gone.atexit = False

    def processing_status(self, message: Message) -> ProcessingStatus:
        """What to do with this delivery; ASSIGNED claims the message."""
        turn = _turn(message)
        key = self._lifecycle.key_of(turn)
        if key in self._assigned:
            # Even where its lease has run out: the handler still runs, in this process.
            self._note(key, "busy")
            return ProcessingStatus.IGNORE
        run_inline(self._lifecycle.claim(self._driver, [turn]))
        if isinstance(turn.outcome, Untracked):
            self._note(key, "untracked")
            return ProcessingStatus.ASSIGNED
        if key is not None and turn.claim is not None:
            self._note(key, None)
            with self._lock:
                self._assigned[key] = _Assigned(turn, turn.claim)
            return ProcessingStatus.ASSIGNED
        if isinstance(turn.outcome, Handled):
            self._note(key, None)
            return ProcessingStatus.MESSAGE_HANDLED
        self._note(key, _REASONS[type(turn.outcome)])
        return ProcessingStatus.IGNORE

    def reason(self, message: Message) -> Reason | None:
        """Why the last status of the message was IGNORE; None where it was another.

        Only "completed" may be acknowledged as done.
        """
        key = self._lifecycle.key_of(_turn(message))
        note = None if key is None else self._notes.get(key)
        return None if note == "untracked" else note

    def add_deferred_message(
        self, message: Message, deferred: Message, destination: str = ""
    ) -> None:
        """Keep `deferred` under the message being processed, until that is handled.

        `deferred` keeps its id; one id for one destination is kept once. Raises MessageError for an
        unusable id and beyond the limit of one message, RefusedError where the handler of `message`
        does not run under a claim of this service.
        """
        key = self._tracked_key(message)
        check_message(deferred)
        if destination:
            check_id(destination, "destination")
        with self._lock:
            assigned = None if key is None else self._assigned.get(key)
            if key is None or assigned is None:
                raise RefusedError(
                    f"{message.id!r} is not being processed under a claim here, so it cannot defer "
                    f"{deferred.id!r}: send it at once"
                )
            position = len(assigned.deferred)
            if position >= MOST_DEFERRED:
                raise MessageError(f"a handler may send {MOST_DEFERRED:,} messages, and no more")
            kept = WaitingMessage(deferred.id, destination, deferred, key, position)
            assigned.deferred.setdefault((kept.id, destination), kept)

    def message_handled(self, message: Message) -> None:
        """The handler has succeeded; that and its deferred messages are stored together, or not at
        all.

        Safe to repeat. Raises FencedError where another worker has taken the message over,
        RefusedError where its handler does not run here.
        """
        key = self._tracked_key(message)
        if key is None:
            return
        assigned = self._take(key)
        if assigned is not None:
            self._store_handled(assigned)
        elif self._state(key) not in (State.HANDLED, State.COMPLETED):
            raise RefusedError(
                f"{message.id!r} is not being processed here: call processing_status first"
            )

    def get_deferred_messages(self, message: Message) -> Sequence[WaitingMessage]:
        """The deferred messages that are not sent yet, in the order of sending."""
        key = self._tracked_key(message)
        if key is None:
            return []
        with self._lock:
            if key in self._assigned:
                return list(self._assigned[key].deferred.values())
        return self._calls.mailbox.deferred(key)

    def deferred_message_sent(self, message: Message, deferred: WaitingMessage) -> None:
        """`deferred` is sent: remove it. After the last one `message` is completed.

        Safe to repeat. Raises RefusedError where the message is not handled yet, and where another
        message deferred it.
        """
        key = self._tracked_key(message)
        if key is None or deferred.parent != key:
            raise RefusedError(f"{deferred.id!r} was not deferred by {message.id!r}")
        if key in self._assigned:
            raise RefusedError(f"{message.id!r} is not handled yet: nothing may be sent before")
        waits = [deferred]
        if deferred.number is None:
            # `get_deferred_messages` gave it before it was stored.
            waits = [one for one in self._calls.mailbox.deferred(key) if one.name == deferred.name]
        self._calls.mailbox.sent(waits)

    def processing_completed(self, message: Message) -> None:
        """Nothing is left to do. A message that is not marked as handled is marked first.

        Safe to repeat. Raises RefusedError where deferred messages still wait, or the handler has
        not succeeded, FencedError where another worker took the message over.
        """
        key = self._tracked_key(message)
        if key is None:
            self._note(self._lifecycle.key_of(_turn(message)), None)
            return
        assigned = self._take(key)
        if assigned is not None and not assigned.deferred:
            self._store(assigned, self._calls.complete)
            return
        if assigned is not None:
            self._store_handled(assigned)
        self._calls.mailbox.finish([key])
        if self._state(key) is not State.COMPLETED:
            waiting = len(self._calls.mailbox.deferred(key))
            left = f"deferred messages that wait to be sent: {waiting}"
            why = left if waiting else "it is not handled"
            raise RefusedError(f"{message.id!r} cannot be completed: {why}")

    def processing_failed(self, message: Message, error: BaseException) -> timedelta | None:
        """The handler has failed, or a step after it; deferred messages not stored yet are dropped.

        Returns after how long to deliver the message again; None when no further attempt is
        granted, and it belongs into the error queue. Where an error that is not an Exception stops
        this process, the handler has not failed: its claim is given back. An error in recording
        that is logged; the claim runs out then.
        """
        key = self._tracked_key(message)
        assigned = None if key is None else self._take(key)
        turn = _turn(message) if assigned is None else assigned.turn
        turn.called()
        turn.raised(error)
        if assigned is None:
            self._note(self._lifecycle.key_of(turn), None)
        run_inline(self._lifecycle.store(self._driver, [turn]))
        verdict = cast(Ending, turn.ending).verdict
        if isinstance(verdict, DeadLetter):
            return None
        return timedelta(seconds=verdict.delay_s if isinstance(verdict, Delay) else 0.0)

    def _tracked_key(self, message: Message) -> Key | None:
        """The key of the message; None where it runs without a claim."""
        key = self._lifecycle.key_of(_turn(message))
        return None if key is None or self._notes.get(key) == "untracked" else key

    def _take(self, key: Key) -> _Assigned | None:
        with self._lock:
            return self._assigned.pop(key, None)

    def _store_handled(self, assigned: _Assigned) -> None:
        deferred = list(assigned.deferred.values())
        self._store(assigned, lambda claim: self._calls.handled(claim, deferred=deferred))

    def _store(self, assigned: _Assigned, write: Callable[[Claim], object]) -> None:
        """Call the ledger until it answers, or the lease is over."""
        claims, heartbeat = [assigned.claim], self._lifecycle.heartbeat

        async def attempt() -> None:
            # The claim as it was last extended: so the ledger need not read the record first.
            write(*heartbeat.newest(claims))

        try:
            if self._driver.is_joined:
                run_inline(attempt())
            else:
                run_inline(self._lifecycle.retried(self._driver, claims, attempt))
        finally:
            heartbeat.let_go(claims)

    def _state(self, key: Key) -> State | None:
        record = self._calls.find(key)
        return None if record is None else record.state

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
    heartbeat.let_go([one.claim for one in list(assigned.values())])


def _turn(message: Message) -> Turn:
    return Turn(message.id, fingerprint_of(message.body), message)
