"""RequestState: a request that runs once under its key, for the middleware and its handler."""

from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar, cast

from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely.core.commands import Duplicate, Handled
from oncely.core.control import EffectUnknown
from oncely.core.errors import ConfigError, EndedError, OncelyError, describe
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import is_newest
from oncely.core.turn import WITHDRAWN, Turn, leaves_doubt
from oncely.http import problems
from oncely.http.answers import EVENT_STREAM, STREAMED, HttpAnswer, answer_of, by_name, to_keep
from oncely.http.http_request import HttpRequest
from oncely.http.keyed_requests import KeyedRequests, LateError
from oncely.http.problems import Problem, problem_of
from oncely.ledger.driver import Driver, SyncDriver, run_inline
from oncely.ledger.inbox import AsyncInbox, AsyncInboxDriver, Inbox
from oncely.lifecycle.heartbeat import AWAY
from oncely.lifecycle.work import Work

R = TypeVar("R")
Fields = Sequence[tuple[str, str]]

_log = EventLog(__name__)

_NOT_KEPT = "not_kept"
"""The field with the reason, if a response is not kept."""
_ANSWER = "http answer"
"""The step with the response, if that was not known when the transaction was written."""


class ErrorAnswer(OncelyError):
    """The application's response is an error: `answer` is for the client."""

    def __init__(self, answer: HttpAnswer, cause: BaseException | None) -> None:
        why = "" if cause is None else f": {describe(cause)}"
        super().__init__(f"answered {answer.line}{why}")
        self.answer = answer


class UnknownAnswer(ErrorAnswer, EffectUnknown):
    """The same, where nobody knows whether it has had its effect."""


class _End(Enum):
    """What is written of a request's end."""

    OPEN = auto()
    WRITTEN = auto()
    """All, in a transaction of the application's, which may be committed."""
    OVER = auto()
    """No transaction may write anything more: the request is over."""


class RequestState(Work):
    """A handler's view of its request; `key` is the client's, or None if the request has no key."""

    why_passed: str | None = None
    """Why the response passes through, and is not kept; None if it is held back and kept."""
    cause: BaseException | None = None
    """What the application has raised, where its framework makes a response of that."""

    def __init__(
        self,
        requests: KeyedRequests,
        key: str | None = None,
        request: HttpRequest | None = None,
    ) -> None:
        """With a key for `request`. Raises Refused where that may not run, and ConfigError if it is
        handled under the same consumer already.
        """
        turn = Turn(None) if key is None or request is None else requests.turn(key, request)
        super().__init__(requests.lifecycle, turn, requests.driver)
        self.key = key
        self._requests = requests
        self._given: HttpAnswer | None = None
        """The application's response, if it is known before the transaction is written."""
        self._written = _End.OPEN
        self._transactions = 0
        """How many transactions are open in which the end will be written."""
        around = getattr(request, "oncely", None)
        if isinstance(around, RequestState) and around._names() == self._names():
            raise ConfigError(
                f"idempotency keys: consumer {self._lifecycle.consumer!r} is twice around this "
                "application; remove one, or give it another consumer"
            )

    def _names(self) -> tuple[object, ...]:
        return self._lifecycle.ledger, self._lifecycle.consumer, self.turn.message_id

    # ---- For the handler -------------------------------------------------------------------------

    def transaction(self, connection: Any) -> "RequestTransaction":
        """End this request inside the caller's own transaction; for `with` and `async with`.

        `connection` is any that `Ledger.transaction` takes. The block gets an inbox, as there,
        which sends messages. At the end of the block the request's record and the deferred
        messages are written in the transaction. The caller then commits it with its own rows,
        before the response is returned or, under ASGI, before the application returns. A request
        without a key is not recorded; its deferred messages are still part of the transaction.
        """
        return RequestTransaction(self._within(connection), self._within_async(connection))

    def respond(self, answer: R) -> R:
        """Store this response in the transaction; returns it, for the handler to return.

        Call it inside the block of `transaction`. `answer` is a response of Starlette, Flask or
        Django, or an HttpAnswer; raises MessageError for anything else. Without this call the
        response is stored as soon as the handler returns it, right after the commit.
        """
        self._given = answer_of(answer)
        return answer

    @contextmanager
    def _within(self, connection: Any) -> Iterator[Inbox]:
        with self._opened(), self._lifecycle.ledger.transaction(connection) as inbox:
            yield inbox
            run_inline(self._write(SyncDriver(inbox, is_joined=True)))

    @asynccontextmanager
    async def _within_async(self, connection: Any) -> AsyncIterator[AsyncInbox]:
        with self._opened():
            async with self._lifecycle.ledger.transaction(connection) as inbox:
                yield inbox
                await self._write(AsyncInboxDriver(inbox))

    @contextmanager
    def _opened(self) -> Iterator[None]:
        self._transactions += 1
        try:
            yield
        finally:
            self._transactions -= 1

    async def _write(self, driver: Driver) -> None:
        """Write the request's end, with its deferred messages, in the transaction of `driver`.

        Raises EndedError if another worker has taken the request over. Raises ConfigError for a
        second transaction after the first was committed, and after the response.
        """
        if self.turn.claim is None:
            return
        if self._written is _End.OVER:
            raise ConfigError(
                "transaction: the request has ended; leave the block before you return the response"
            )
        if self._written is _End.WRITTEN and await self._is_handled(driver):
            raise ConfigError("transaction: a request has one transaction with its claim")
        self.turn.returned(None if self._given is None else self._kept(self._given))
        self.turn.ended(self._lifecycle.policy)
        await self._lifecycle.store_joined(driver, [self.turn])
        self._written = _End.WRITTEN
        reached("before_commit")

    # ---- For the middleware ----------------------------------------------------------------------

    async def answered(self, run: Callable[[], Awaitable[HttpAnswer | None]]) -> HttpAnswer | None:
        """The response to the request: that of the application, which `run` gives; or the one to a
        duplicate, or to a request that may not run. Raises the application's own errors.

        None where `run` gives none: the response passes through, and `passed` is called at its end.
        """
        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self)
                if not self.is_new:
                    return await self._replayed()
                answer = await run()
                if answer is None:
                    stack.pop_all()
                else:
                    self._note(answer)
                return answer
        except Exception as error:  # noqa: BLE001 - the application's own error is raised again.
            return self._told(error)

    def reason_to_pass(
        self, held: int, fields: Fields = (), *, is_whole: bool = True, is_late: bool = False
    ) -> str | None:
        """Why a response is not held back any longer, of which there are `held` bytes; None if it
        is.
        """
        if held > self._requests.max_body:
            return "it is larger than what is kept"
        if is_whole:
            return None
        named = by_name(fields)
        is_endless = named.get("content-type", "").startswith(EVENT_STREAM)
        return STREAMED if (is_endless or is_late) and "content-length" not in named else None

    async def passed(self, status: int, error: BaseException | None = None) -> None:
        """The response has passed through, or `error` has broken it off. It is logged where that
        cannot be stored: the client has its response already.
        """
        if isinstance(error, GeneratorExit | CancelledError):
            # Nobody reads on: the application has responded, and does not have its effect again.
            error = None
        if error is None:
            try:
                self._note(HttpAnswer(status))
            except ErrorAnswer as failure:
                error = failure
        try:
            await self._leave(error)
        except Exception:  # noqa: BLE001 - as said.
            _log.warning(
                "the end of a request could not be stored: %(reason)s; its response has been sent",
                exc_info=True,
                extra={"event": "request_not_completed"},
            )

    async def may_be_committed(self) -> bool:
        """Whether the application still has to commit or to roll back its transaction."""
        if self.turn.claim is None or self._written is not _End.WRITTEN:
            return self._transactions > 0
        try:
            return not await self._is_handled(self._requests.driver)
        except AWAY:
            return False

    # ---- Its claim and its end -------------------------------------------------------------------

    async def _begin(self, driver: Driver) -> None:
        turn = self.turn
        try:
            # Of this turn, also where it is asked for only when another has taken its place here.
            claiming = self._lifecycle.claim(driver, [turn])
            await self._requests.in_time(
                driver, claiming, lambda: self._lifecycle.give_back(driver, [turn])
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
            await self._requests.in_time(driver, self._store_end(driver))
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
        was_written, self._written = self._written is _End.WRITTEN, _End.OVER
        turn = self.turn
        if was_written and await self._is_committed(driver):
            await self._end_committed(driver)
            return
        lost = None
        if turn.ending is not WITHDRAWN:
            if was_written and turn.error is None:
                lost = EndedError(
                    "transaction: the application has responded, and has not committed it; commit "
                    "it before you return the response"
                )
                turn.raised(lost)
            # Also where it has ended before: a transaction that was rolled back has written
            # nothing.
            turn.ended(self._lifecycle.policy, is_stopping=self._lifecycle.is_stopping())
        await super()._end(driver)
        if lost is not None:
            raise lost

    async def _is_committed(self, driver: Driver) -> bool:
        try:
            claims = [cast(Claim, self.turn.claim)]
            committed = partial(self._is_handled, driver)
            return await self._lifecycle.retried(driver, claims, committed)
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
        if self._given is not None or self.result is None:
            return
        try:
            # A relay may have completed the record by now, which cannot change any more.
            key = cast(Key, self.turn.key)
            await driver.run(driver.calls.add_step, key, _ANSWER, self.result)
        except AWAY:
            self._log_not_kept(exc_info=True)

    # ---- What its response means -----------------------------------------------------------------

    def _note(self, answer: HttpAnswer) -> None:
        """Note what the application's response means for the record. Raises ErrorAnswer if the
        request has failed.
        """
        self._requests.outage.over()
        reason = self.why_passed or self.reason_to_pass(len(answer.body))
        if not self._requests.keeps(answer.status):
            if answer.status >= 500:
                cause, policy = self.cause, self._lifecycle.policy
                is_doubt = cause is not None and leaves_doubt(policy, cause)
                raise (UnknownAnswer if is_doubt else ErrorAnswer)(answer, cause)
            self.turn.ended_as(WITHDRAWN)
        elif reason is None:
            self.result = self._kept(answer)
        else:
            self._log_not_kept(reason=reason)
            self.result = {"status": answer.status, _NOT_KEPT: reason}

    def _kept(self, answer: HttpAnswer) -> dict[str, Any]:
        try:
            kept = self._requests.keep(answer)
        except Exception as error:  # noqa: BLE001 - the request has had its effect.
            reason = f"keep: {describe(error)}"
            self._log_not_kept(reason=reason)
        else:
            if kept is not None:
                return to_keep(kept, self._requests.not_replayed)
            reason = "the application keeps nothing of it"
        return {"status": answer.status, _NOT_KEPT: reason}

    def _log_not_kept(self, *, exc_info: bool = False, **reason: str) -> None:
        _log.warning(
            "the answer to request '%(message_id)s' is not kept: %(reason)s; a repetition is "
            "answered with 409",
            exc_info=exc_info,
            extra={"event": "answer_not_kept", "message_id": self.turn.message_id, **reason},
            stacklevel=2,
        )

    async def _replayed(self) -> HttpAnswer:
        """The response to a duplicate: the first request's response."""
        self._requests.outage.over()
        record = cast(Duplicate | Handled, self.turn.outcome).record
        kept = self.result
        if kept is None and record.is_handled:
            driver = self._requests.driver
            kept = (await driver.run(driver.calls.steps, record.key)).get(_ANSWER)
        return self._requests.replayed(kept) or self._requests.told(_no_answer(kept, record))

    def _told(self, error: Exception) -> HttpAnswer:
        """The response for an `error` of the middleware; raises an error of the application."""
        turn = self.turn
        if isinstance(error, ErrorAnswer) and error is turn.error:
            return error.answer
        has_run = turn.is_duplicate or turn.claim is not None or turn.context is not None
        problem = None if error is turn.error else problem_of(error, has_run=has_run)
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


def _no_answer(kept: Any, record: Record) -> Problem:
    if isinstance(kept, dict) and _NOT_KEPT in kept:
        return problems.answer_not_kept(kept[_NOT_KEPT])
    if record.state is State.FAILED:
        return problems.FAILED_PERMANENTLY
    if record.state is State.PROCESSING:
        return problems.IN_FLIGHT
    return problems.answer_not_kept("the server stopped before it could be")


@dataclass(frozen=True, slots=True)
class RequestTransaction:
    """The block in which a request's end becomes part of the caller's transaction."""

    _block: AbstractContextManager[Inbox]
    _async_block: AbstractAsyncContextManager[AsyncInbox]

    def __enter__(self) -> Inbox:
        return self._block.__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        return self._block.__exit__(*raised)

    async def __aenter__(self) -> AsyncInbox:
        return await self._async_block.__aenter__()

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await self._async_block.__aexit__(*raised)
