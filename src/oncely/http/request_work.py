"""Request work: a request that runs under a claim, and what its answer means for the record."""

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from oncely._util.crash_points import reached
from oncely.core.commands import Duplicate, Handled
from oncely.core.errors import (
    BusyError,
    ConfigError,
    ContentionError,
    EndedError,
    ExhaustedError,
    FencedError,
    InDoubtError,
    MismatchError,
    OncelyError,
    StoreUnavailable,
    describe,
)
from oncely.core.record import Record, State
from oncely.core.rules import WITHDRAWN, is_newest
from oncely.core.verdicts import Phase
from oncely.engine.async_calls import AsyncCalls
from oncely.http import problems
from oncely.http.answers import HttpAnswer, to_keep, to_replay
from oncely.http.problems import Problem
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.held_message import HeldMessage
from oncely.lifecycle.patience import AWAY
from oncely.lifecycle.turn import Turn
from oncely.lifecycle.work import Work

if TYPE_CHECKING:
    from oncely.http.keyed_requests import KeyedRequests

_log = logging.getLogger(__name__)

_NOT_KEPT = "not_kept"
"""In what is kept of an answer that is not: why."""
_ANSWER = "http answer"
"""The step under which an answer is kept that was not known when the transaction was written."""


class ErrorAnswer(OncelyError):
    """The application has answered that it failed: `answer` is for the client."""

    def __init__(self, answer: HttpAnswer, cause: BaseException | None = None) -> None:
        why = "" if cause is None else f": {describe(cause)}"
        super().__init__(f"answered {answer.line}{why}")
        self.answer = answer


class RequestWork(Work):
    """The handling of one request, which may end in a transaction of the application's own."""

    def __init__(self, handling: Handling, turn: Turn, not_replayed: Collection[str]) -> None:
        super().__init__(handling, turn)
        self._not_replayed = not_replayed
        self._given: HttpAnswer | None = None
        """What the application has said that it will answer."""
        self._is_written = False
        """Whether its end is written in a transaction, which may be committed."""
        self._is_withdrawn = False
        self._open = 0
        """Transactions that have begun, and are not written."""
        self._has_ended = False

    def is_of(self, handling: Handling, message_id: str) -> bool:
        """Whether it is the work of that message, under the same consumer of the same ledger."""
        own = (self._handling.ledger, self._handling.consumer, self.turn.asked.message_id)
        return own == (handling.ledger, handling.consumer, message_id)

    @contextmanager
    def in_transaction(self) -> Iterator[None]:
        """While this is entered, a transaction is open in which the end is to be written."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def may_be_committed(self) -> bool:
        """Whether the application has yet to commit, or to roll back, what it has written."""
        held = self.turn.held
        if held is None or not self._is_written:
            return self._open > 0
        try:
            return not await self._is_handled(held.calls)
        except AWAY:
            return False

    def give(self, answer: HttpAnswer) -> None:
        """The answer is known before the transaction is written."""
        self._given = answer

    def keep(self, answer: HttpAnswer) -> None:
        """This is what repetitions are given."""
        self.result = to_keep(answer, self._not_replayed)

    def keep_nothing(self, status: int, reason: str) -> None:
        """The answer has passed through, or is not to be kept."""
        self.result = {"status": status, _NOT_KEPT: reason}

    def withdraw(self) -> None:
        """The application refuses the request: it counts as never made."""
        self._is_withdrawn = True

    async def write(self, calls: AsyncCalls) -> None:
        """Write in the transaction of `calls` that the request is handled, with all that it sends.

        Raises EndedError where another worker has taken it over, ConfigError for a second one where
        the first is committed, and for a request that is answered.
        """
        if self.turn.held is None:
            return
        if self._has_ended:
            raise ConfigError(
                "transaction: the request has ended; leave the block before you return the answer"
            )
        if self._is_written and await self._is_handled(calls):
            raise ConfigError("transaction: a request has one transaction with its claim")
        given = self._given
        self.turn.result = None if given is None else to_keep(given, self._not_replayed)
        await self._handling.end_joined(calls, [self.turn])
        self._is_written = True
        reached("before_commit")

    async def _end(self, held: HeldMessage) -> None:
        self._has_ended = True
        if self._is_written and await self._is_committed(held):
            await self._end_committed(held)
            return
        # What is written in a transaction that is rolled back is nothing.
        self.turn.ending = WITHDRAWN if self._is_withdrawn else None
        lost = None
        if self._is_written and self.turn.error is None and not self._is_withdrawn:
            self.turn.error = lost = EndedError(
                "transaction: the application has answered, and has not committed it; commit it "
                "before you return the answer"
            )
        await super()._end(held)
        if lost is not None:
            raise lost

    async def _is_committed(self, held: HeldMessage) -> bool:
        try:
            return await held.say(held.calls, lambda: self._is_handled(held.calls))
        except AWAY as error:
            self._handling.heartbeat.let_go_many([held.claim])
            self.turn.refusal = error
            raise

    async def _is_handled(self, calls: AsyncCalls) -> bool:
        claim = cast(HeldMessage, self.turn.held).claim
        record = await calls.find(claim.key)
        return record is not None and record.is_handled and is_newest(claim, record)

    async def _end_committed(self, held: HeldMessage) -> None:
        reached("after_commit")
        self._handling.heartbeat.let_go_many([held.claim])
        self.turn.phase = Phase.STORED
        self.is_settled = True
        if self._given is not None or self.result is None:
            return
        try:
            # The record may be completed by now, by a relay, and does not change any more.
            await held.calls.add_step(held.claim.key, _ANSWER, self.result)
        except AWAY:
            names = {"message_id": held.claim.key.message_id}
            _log.warning("answer_not_kept", exc_info=True, extra=names)


class Exchange:
    """A request and its answer."""

    def __init__(self, requests: "KeyedRequests", work: RequestWork) -> None:
        self._requests = requests
        self.work = work
        self.most_kept = requests.max_body
        """Bytes of a body."""

    def note(self, answer: HttpAnswer, cause: BaseException | None = None) -> None:
        """The application has answered: inside the work. Raises ErrorAnswer where it has failed;
        `cause` is why, where that is known.
        """
        work, status = self.work, answer.status
        if len(answer.body) > self.most_kept:
            self.note_passed(status, "it is larger than what is kept")
        elif self._requests.keeps(status):
            work.keep(answer)
        elif status >= 500:
            raise ErrorAnswer(answer, cause)
        else:
            work.withdraw()

    def note_passed(self, status: int, reason: str) -> None:
        """The answer has passed through, and is not kept."""
        if not self._requests.keeps(status):
            self.note(HttpAnswer(status))
            return
        names = {"message_id": self.work.turn.asked.message_id, "reason": reason}
        _log.warning("answer_not_kept", extra=names)
        self.work.keep_nothing(status, reason)

    async def replayed(self, calls: AsyncCalls) -> HttpAnswer:
        """The answer to a duplicate: the first one's."""
        kept, record = self.work.result, _record_of(self.work.turn)
        if kept is None and record is not None and record.is_handled:
            kept = (await calls.steps(record.key)).get(_ANSWER)
        return to_replay(kept) or self._requests.told(_no_answer(kept, record))

    def told(self, error: BaseException) -> HttpAnswer:
        """The answer where `error` stands around the application; raises it where it is its own."""
        turn = self.work.turn
        if isinstance(error, ErrorAnswer) and error is turn.error:
            return error.answer
        problem = None if error is turn.error else _problem(error, has_run=turn.begun is not None)
        if problem is None:
            raise error
        if turn.begun is not None or problem.status >= 500:
            _log.warning("request_refused", exc_info=error)
        return self._requests.told(problem)


def _record_of(turn: Turn) -> Record | None:
    match turn.outcome:
        case Duplicate(record):
            return record
        case Handled(claim):
            return claim.record
    return None


def _no_answer(kept: Any, record: Record | None) -> Problem:
    if isinstance(kept, dict) and _NOT_KEPT in kept:
        return problems.answer_not_kept(kept[_NOT_KEPT])
    if record is not None and record.state is State.FAILED:
        return problems.failed_permanently()
    if record is not None and record.state is State.PROCESSING:
        return problems.in_flight()
    return problems.answer_not_kept("the server stopped before it could be")


def _problem(error: BaseException, *, has_run: bool) -> Problem | None:
    """What the client is told of a request that was not granted, or of whose end the ledger does
    not know.
    """
    match error:
        case BusyError() | FencedError():
            return problems.in_flight()
        case MismatchError():
            return problems.key_reused()
        case InDoubtError():
            return problems.in_doubt()
        case ExhaustedError():
            return problems.failed_permanently()
        case StoreUnavailable() | ContentionError():
            return problems.in_doubt() if has_run else problems.unavailable()
    return None
