"""An attempt at handling a message: it knows whether the handler raised, and what follows."""

import inspect
from asyncio import to_thread
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from oncely._util.event_log import EventLog
from oncely.core.commands import Duplicate, Exhausted, Handled
from oncely.core.errors import ConfigError, OncelyError, StoreError, describe
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.turn import Turn, after_refusal
from oncely.core.verdicts import Ack, Counted, Verdict
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.failures import log_failure
from oncely.lifecycle.heartbeat import AWAY
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.lifecycle.transacting import run, run_async
from oncely.lifecycle.work import Work, run_new, run_new_async
from oncely.lifecycle.wrapping import name_of

_log = EventLog(__name__)


def log_rejected(message_id: str | None, reason: str) -> None:
    """Log that a message is rejected."""
    _log.warning(
        "message '%(message_id)s' was rejected: %(reason)s",
        extra={"event": "rejected", "message_id": message_id, "reason": reason},
        stacklevel=2,
    )


class StartError(SystemExit, ConfigError):
    """A ConfigError that ends the process of a worker with its one line."""


def check_ledger(ledger: Ledger) -> None:
    """Raise StartError where the ledger has no table, or is of no use to a worker else. One whose
    database is away is waited for.
    """
    try:
        ledger.find(Key("oncely", "start"))
    except AWAY:
        pass
    except StoreError as error:
        raise StartError(f"ledger: {error}") from None


class Attempt:
    """Runs a handler under a claim, or, given an Engine or sessionmaker, in a transaction with it.

    Run it once. It raises the same errors as a function under `once`. `kind` is what operators see
    this process as. If `is_followed`, the framework sends what follows the message when it has
    ended, and then `finish` is called: nothing follows a later duplicate.
    """

    result: Any = None
    """The handler's result; for a duplicate, the kept result."""

    def __init__(
        self,
        kind: str,
        lifecycle: Lifecycle,
        turn: Turn,
        source: Any = None,
        *,
        is_followed: bool = False,
    ) -> None:
        lifecycle.ledger.recorder.handles_as(kind, lifecycle.consumer)
        self._is_followed = is_followed and lifecycle.keeps_result
        self._lifecycle = lifecycle.followed if self._is_followed else lifecycle
        self._kind = kind
        self._source = source
        self.turn = turn

    def run(self, call: Callable[..., Any]) -> None:
        """Let `call` handle the message, if it is new; it gets the session, if there is one."""
        if self._source is not None:
            self.result = run(self._lifecycle, self._source, self.turn, call)
        else:
            self.result = run_new(Work(self._lifecycle, self.turn), call)
        self._answered()
        if (claim := self.turn.claim) and claim.former:
            self._discard_dead(claim.key)

    async def run_async(self, call: Callable[..., Awaitable[Any]]) -> None:
        """As `run`, for an async handler."""
        if self._source is not None:
            self.result = await run_async(self._lifecycle, self._source, self.turn, call)
        else:
            self.result = await run_new_async(Work(self._lifecycle, self.turn), call)
        self._answered()
        if (claim := self.turn.claim) and claim.former:
            await to_thread(self._discard_dead, claim.key)

    def _discard_dead(self, key: Key) -> None:
        """Let what an earlier attempt has left be a dead letter no longer."""
        ledger = self._lifecycle.ledger
        with suppress(StoreError):
            if letters := ledger.mailbox.dead_of(key):
                ledger.discard_dead([letter.id for letter in letters])

    def _answered(self) -> None:
        self._lifecycle.outage.over("claims")
        if self.before is not None:
            names = {"message_id": self.turn.message_id, "consumer": self._lifecycle.consumer}
            _log.info(
                "message '%(message_id)s' of '%(consumer)s' is a duplicate: it does not run again",
                extra={"event": "duplicate", **names},
            )

    @property
    def has_result(self) -> bool:
        """Whether `result` is the handler's result, of this attempt or of an earlier one."""
        before = self.before
        return before is None or (before.is_handled and self._lifecycle.keeps_result)

    @property
    def is_repeated(self) -> bool:
        """Whether it is of a message that was completed before: what follows was sent."""
        before = self.before
        return before is not None and before.state is not State.HANDLED

    @property
    def before(self) -> Record | None:
        """The record of a duplicate; None if this attempt was the first to succeed."""
        match self.turn.outcome:
            case Duplicate(record) | Handled(_, record):
                return record
        return None

    @property
    def is_same(self) -> bool:
        """Whether a duplicate is the framework's own message once more, and not another one under
        the same key.
        """
        own, before = self.turn.metadata, self.before
        return own is None or (
            before is not None and own.items() <= (before.metadata or {}).items()
        )

    def finish(self) -> None:
        """What follows is sent."""
        if self._is_followed and not self.is_repeated:
            run_inline(self._lifecycle.finish(self._lifecycle.sync_driver, [self.turn]))

    async def finish_async(self) -> None:
        """As `finish`, for an async handler."""
        if self._is_followed and not self.is_repeated:
            await self._lifecycle.finish(self._lifecycle.async_driver, [self.turn])

    def keep_dead(self, sent: Message, error: BaseException) -> None:
        """Keep the message as a dead letter, since the framework has given it up because of that
        error; `sent` is what a Resender sends, whatever its id.
        """
        turn, ledger, reason = self.turn, self._lifecycle.ledger, describe(error)
        if not ledger.can_defer:
            return
        if isinstance(turn.outcome, Exhausted):
            # It is refused because it had failed before.
            reason = turn.outcome.record.error or reason
        turn.message = replace(sent, id=turn.message_id or "")
        rows = RetryQueue(self._lifecycle.consumer).dead_letters(turn, reason)
        # In place of what a Resender has just sent, and is about to remove.
        ledger.mailbox.keep((), [replace(row, destination=self._kind) for row in rows])

    def verdict(self, error: Exception) -> Verdict | None:
        """What follows after `error` was raised; None if the handler itself has just failed."""
        ending = self.turn.ending
        if error is self.turn.error:
            is_doubt = ending is not None and ending.counted is Counted.IN_DOUBT
            if is_doubt:
                self.log_failure(error)
            return self.own_verdict if is_doubt else None
        if isinstance(error, StoreError):
            self._lifecycle.outage.met(error, "claims")
        if self._source is not None and ending is not None:
            # Also an error of a database whose transaction lost a race, or that was down.
            return ending.verdict
        return after_refusal(error).verdict if isinstance(error, OncelyError) else None

    def log_failure(self, error: Exception) -> None:
        """Log that the handler has raised `error`: the message, the attempt, the next try."""
        values = {
            "message_id": self.turn.message_id,
            "consumer": self._lifecycle.consumer,
            "attempt": None if self.turn.claim is None else self.turn.claim.attempts,
        }
        log_failure(_log, error, self.turn.ending, values)

    @property
    def own_verdict(self) -> Verdict:
        """What follows by the policy, also after the handler has failed."""
        return Ack() if self.turn.ending is None else self.turn.ending.verdict


def session_parameter(function: Callable[..., Any], but: Sequence[str] = ()) -> str:
    """The name of the last parameter, by which the session is passed: callers may pass those before
    it by name. The parameters `but` do not count. Raises ConfigError if no other is left.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    if names and names[-1] not in but:
        return names[-1]
    raise ConfigError(
        f"transaction: {name_of(function)} takes no session; add a last parameter `session`"
    )
