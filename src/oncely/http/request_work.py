"""Request work: a request that runs under a claim, and what its response means for the record."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
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
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import is_newest
from oncely.core.turn import WITHDRAWN, Turn
from oncely.http import problems
from oncely.http.answers import HttpAnswer, to_keep
from oncely.http.problems import Problem
from oncely.ledger.driver import Driver
from oncely.lifecycle.claim_keeper import AWAY
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.work import Work

if TYPE_CHECKING:
    from oncely.http.keyed_requests import KeyedRequests

_log = EventLog(__name__)

_NOT_KEPT = "not_kept"
"""The field with the reason, if a response is not kept."""
_ANSWER = "http answer"
"""The step with the response, if that was not known when the transaction was written."""


class LateError(StoreUnavailable):
    """The ledger has not answered in time: what it was asked goes on."""


class ErrorAnswer(OncelyError):
    """The application's response is an error: `answer` is for the client."""

    def __init__(self, answer: HttpAnswer, cause: BaseException | None = None) -> None:
        why = "" if cause is None else f": {describe(cause)}"
        super().__init__(f"answered {answer.line}{why}")
        self.answer = answer


class RequestWork(Work):
    """The handling of one request, which may end in a transaction of the application's own."""

    def __init__(self, requests: "KeyedRequests", turn: Turn) -> None:
        super().__init__(requests.lifecycle, turn)
        self._requests = requests
        self.most_kept = requests.max_body
        """The largest body to keep, in bytes."""
        self.given: HttpAnswer | None = None
        """The application's response, if it is known before the transaction is written."""
        self._is_withdrawn = False
        """Whether the request counts as never made: the application refuses it."""
        self._is_written = False
        """Whether the end is written in a transaction, which may be committed."""
        self._open = 0
        """The number of open transactions in which nothing is written yet."""
        self._has_ended = False

    def is_of(self, lifecycle: Lifecycle, message_id: str) -> bool:
        """Whether this is the work on that message, under the same consumer of the same ledger."""
        own = (self._lifecycle.ledger, self._lifecycle.consumer, self.turn.message_id)
        return own == (lifecycle.ledger, lifecycle.consumer, message_id)

    @contextmanager
    def in_transaction(self) -> Iterator[None]:
        """Within the block, a transaction is open in which the end will be written."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def may_be_committed(self) -> bool:
        """Whether the application still has to commit or to roll back its transaction."""
        if self.turn.claim is None or not self._is_written:
            return self._open > 0
        try:
            return not await self._is_handled(cast(Driver, self._driver))
        except AWAY:
            return False

    async def write(self, driver: Driver) -> None:
        """Write the request's end, with its deferred messages, in the transaction of `driver`.

        Raises EndedError if another worker has taken the request over. Raises ConfigError for a
        second transaction after the first was committed, and after the response.
        """
        if self.turn.claim is None:
            return
        if self._has_ended:
            raise ConfigError(
                "transaction: the request has ended; leave the block before you return the response"
            )
        if self._is_written and await self._is_handled(driver):
            raise ConfigError("transaction: a request has one transaction with its claim")
        given = self.given
        self.turn.returned(None if given is None else self._kept(given))
        self.turn.ended(self._lifecycle.policy)
        await self._lifecycle.store_joined(driver, [self.turn])
        self._is_written = True
        reached("before_commit")

    async def _begin(self, driver: Driver) -> None:
        turn = self.turn
        try:
            await self._requests.in_time(
                driver, super()._begin(driver), lambda: self._lifecycle.give_back(driver, [turn])
            )
        except LateError:
            # The claim may still come, in that turn: it is given back then.
            self.turn = Turn(turn.message_id, turn.fingerprint, turn.message)
            if not self._lifecycle.run_untracked([self.turn]):
                raise

    async def _end(self, driver: Driver) -> None:
        if self.turn.claim is None:
            await super()._end(driver)
            return
        try:
            await self._requests.in_time(driver, self._store_end(driver), _nothing)
        except LateError as error:
            _log.warning(
                "the end of request '%(message_id)s' is not stored yet: %(reason)s; its response "
                "is sent",
                exc_info=error,
                extra={
                    "event": "request_not_completed",
                    "message_id": self.turn.message_id,
                },
            )

    async def _store_end(self, driver: Driver) -> None:
        self._has_ended = True
        if self._is_written and await self._is_committed(driver):
            await self._end_committed(driver)
            return
        lost = None
        if self._is_withdrawn:
            self.turn.ended_as(WITHDRAWN)
        else:
            if self._is_written and self.turn.error is None:
                lost = EndedError(
                    "transaction: the application has responded, and has not committed it; commit "
                    "it before you return the response"
                )
                self.turn.raised(lost)
            # Also where it has ended before: a transaction that was rolled back has written
            # nothing.
            self.turn.ended(self._lifecycle.policy, is_stopping=self._lifecycle.is_stopping())
        await super()._end(driver)
        if lost is not None:
            raise lost

    async def _is_committed(self, driver: Driver) -> bool:
        try:
            claims = [cast(Claim, self.turn.claim)]
            keeper = self._lifecycle.keeper
            return await keeper.retried(driver, claims, lambda: self._is_handled(driver))
        except AWAY as error:
            self._lifecycle.let_go([self.turn])
            self.turn.left_in_doubt(error)
            raise

    async def _is_handled(self, driver: Driver) -> bool:
        claim = cast(Claim, self.turn.claim)
        record = await driver.run(driver.calls.find, claim.key)
        return record is not None and record.is_handled and is_newest(claim, record)

    async def _end_committed(self, driver: Driver) -> None:
        self._lifecycle.let_go([self.turn])
        self._lifecycle.note_committed([self.turn])
        self.is_settled = True
        if self.given is not None or self.result is None:
            return
        try:
            # A relay may have completed the record by now, which cannot change any more.
            key = cast(Key, self.turn.key)
            await driver.run(driver.calls.add_step, key, _ANSWER, self.result)
        except AWAY:
            _log_not_kept(self.turn.message_id, exc_info=True)

    def note(self, answer: HttpAnswer, cause: BaseException | None = None) -> None:
        """Note the application's response, within the work. Raises ErrorAnswer if the request has
        failed; `cause` is the error, if it is known.
        """
        status = answer.status
        self._requests.outage.over()
        if len(answer.body) > self.most_kept:
            self.note_passed(status, "it is larger than what is kept")
        elif self._requests.keeps(status):
            self.result = self._kept(answer)
        elif status >= 500:
            raise ErrorAnswer(answer, cause)
        else:
            self._is_withdrawn = True

    def _kept(self, answer: HttpAnswer) -> dict[str, Any]:
        chosen: HttpAnswer | None = answer
        reason = "the application keeps nothing of it"
        if self._requests.keep is not None:
            try:
                chosen = self._requests.keep(answer)
            except Exception as error:  # noqa: BLE001 - the request has had its effect.
                chosen, reason = None, f"keep: {describe(error)}"
                _log_not_kept(self.turn.message_id, reason=reason)
        if chosen is None:
            return {"status": answer.status, _NOT_KEPT: reason}
        return to_keep(chosen, self._requests.not_replayed)

    def note_passed(self, status: int, reason: str) -> None:
        """Note that the response has passed through, and is not kept."""
        if not self._requests.keeps(status):
            self.note(HttpAnswer(status))
            return
        _log_not_kept(self.turn.message_id, reason=reason)
        self.result = {"status": status, _NOT_KEPT: reason}

    async def replayed(self) -> HttpAnswer:
        """The response to a duplicate: the first request's response."""
        self._requests.outage.over()
        kept, record = self.result, _record_of(self.turn)
        if kept is None and record is not None and record.is_handled:
            driver = cast(Driver, self._driver)
            kept = (await driver.run(driver.calls.steps, record.key)).get(_ANSWER)
        return self._requests.replayed(kept) or self._requests.told(_no_answer(kept, record))

    def told(self, error: BaseException) -> HttpAnswer:
        """The response for an `error` of the middleware; raises an error of the application."""
        turn = self.turn
        if isinstance(error, ErrorAnswer) and error is turn.error:
            return error.answer
        has_run = turn.is_duplicate or turn.claim is not None or turn.context is not None
        problem = None if error is turn.error else _problem(error, has_run=has_run)
        if problem is None:
            raise error
        facts: dict[str, Any] = {"message_id": turn.message_id, "status": problem.status}
        if has_run:
            _log.warning(
                "request '%(message_id)s' was answered with %(status)s: %(reason)s",
                exc_info=error,
                extra={"event": "request_refused", **facts},
            )
        elif problem.status >= 500:
            self._requests.outage.met(error, **facts)
        return self._requests.told(problem)


async def _nothing() -> None:
    pass


def _log_not_kept(message_id: str | None, *, exc_info: bool = False, **reason: str) -> None:
    _log.warning(
        "the answer to request '%(message_id)s' is not kept: %(reason)s; a repetition is answered "
        "with 409",
        exc_info=exc_info,
        extra={"event": "answer_not_kept", "message_id": message_id, **reason},
        stacklevel=2,
    )


def _record_of(turn: Turn) -> Record | None:
    match turn.outcome:
        case Duplicate(record) | Handled(_, record):
            return record
    return None


def _no_answer(kept: Any, record: Record | None) -> Problem:
    if isinstance(kept, dict) and _NOT_KEPT in kept:
        return problems.answer_not_kept(kept[_NOT_KEPT])
    if record is not None and record.state is State.FAILED:
        return problems.FAILED_PERMANENTLY
    if record is not None and record.state is State.PROCESSING:
        return problems.IN_FLIGHT
    return problems.answer_not_kept("the server stopped before it could be")


def _problem(error: BaseException, *, has_run: bool) -> Problem | None:
    """The problem of a request that was not granted, or whose end the ledger does not know."""
    match error:
        case BusyError() | FencedError():
            return problems.IN_FLIGHT
        case MismatchError():
            return problems.KEY_REUSED
        case InDoubtError():
            return problems.IN_DOUBT
        case ExhaustedError():
            return problems.FAILED_PERMANENTLY
        case StoreUnavailable() | ContentionError():
            return problems.IN_DOUBT if has_run else problems.UNAVAILABLE
    return None
