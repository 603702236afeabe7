"""Work: a block of code that runs under a claim, as a context manager; `claimed` makes one."""

import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

from oncely._util.crash_points import reached
from oncely.async_ledger import SteadyLedger
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, DuplicateError, FencedError, MessageError
from oncely.core.ids import check_fingerprint
from oncely.core.message import Message, Processing, entered
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.core.verdicts import Phase
from oncely.engine.async_calls import AsyncCalls
from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.held_message import HeldMessage
from oncely.lifecycle.results import KeepResult
from oncely.lifecycle.turn import Asked, Begun, Kept, Turn


class Work:
    """A block that runs under a claim, for `with` and `async with`; to be entered once.

    Within it, messages have steps and can be sent. When it is left the claim is completed with
    `result`; an error is recorded first, and raised as it was.
    """

    result: Any = None
    """The result of the block; for a duplicate, the one that was kept."""
    is_settled = False
    """Whether the ledger knows, after the block, how it ended."""

    def __init__(self, handling: Handling, turn: Turn) -> None:
        self._handling = handling
        self.turn = turn
        self._pid = os.getpid()
        self._entered = entered(None)

    @property
    def is_new(self) -> bool:
        """Whether the block is to do its work: False for a duplicate."""
        return not isinstance(self._begun, Kept)

    @property
    def claim(self) -> Claim | None:
        """The claim under which the block runs; None for a duplicate and an untracked message."""
        return None if self.turn.held is None else self.turn.held.claim

    @property
    def processing(self) -> Processing:
        """What the block can do with the message. Raises DuplicateError for a duplicate."""
        if isinstance(self._begun, Kept):
            raise DuplicateError(f"{self.turn.asked.message_id!r} was processed before")
        return self._begun

    @property
    def _begun(self) -> Begun:
        if self.turn.begun is None:
            raise ConfigError("claimed: nothing is claimed yet; write `with claimed(...) as work:`")
        return self.turn.begun

    def __enter__(self) -> Self:
        run_inline(self._begin(InlineCalls(self._handling.ledger)))
        return self._enter()

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        run_inline(self._leave(error))

    async def __aenter__(self) -> Self:
        await self._begin(SteadyLedger(self._handling.ledger))
        return self._enter()

    async def __aexit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        await self._leave(error)

    def _enter(self) -> Self:
        if self.turn.refusal is not None:
            raise self.turn.refusal
        begun = self._begun
        if isinstance(begun, Kept):
            self.result = self._handling.given_back(self.turn)
        self._entered = entered(None if isinstance(begun, Kept) else begun)
        self._entered.__enter__()
        self.turn.phase = Phase.CALLED
        return self

    async def _leave(self, error: BaseException | None) -> None:
        try:
            # A forked child that leaves the block leaves the claim to its parent.
            if isinstance(self._begun, Kept) or self._pid != os.getpid():
                self.is_settled = True
                return
            unusable = self._note_end(error)
            if self.turn.held is not None:
                await self._end(self.turn.held)
            else:
                self.turn.ending = self._handling.ending_of(self.turn)
            if unusable is not None:
                raise unusable
        finally:
            self._entered.__exit__()

    def _note_end(self, error: BaseException | None) -> MessageError | None:
        """Note how the block ended; return what is wrong with it: a failure, too."""
        self.turn.error = error
        try:
            if isinstance(begun := self.turn.begun, HeldMessage) and begun.unawaited is not None:
                begun.check_awaited()
        except MessageError as unusable:
            if error is None:
                self.turn.error = unusable
                return unusable
        if error is None and self._handling.keeps_result:
            self.turn.result = self._handling.kept(self.turn, self.result)
        return None

    async def _begin(self, calls: AsyncCalls) -> None:
        await self._handling.begin(calls, [self.turn])

    async def _end(self, held: HeldMessage) -> None:
        """Store the end. Where that fails, the effect has happened all the same: the claim runs
        out, and the message is in doubt. An error is raised only where another worker took the
        message over, or where messages that the block has sent are not stored.
        """
        await self._handling.end(held.calls, [self.turn])
        refusal = self.turn.refusal
        self.is_settled = refusal is None
        is_told = isinstance(refusal, FencedError) or bool(held.end())
        if refusal is not None and self.turn.error is None and is_told:
            raise refusal


def run_new(work: Work, call: Callable[[], Any]) -> Any:
    """The result of `work`: `call` does it, where the message is not a duplicate."""
    with work:
        if work.is_new:
            work.result = call()
    return work.result


async def run_new_async(work: Work, call: Callable[[], Awaitable[Any]]) -> Any:
    """As `run_new`, for an async function."""
    async with work:
        if work.is_new:
            work.result = await call()
    return work.result


class JoinedWork(Work):
    """Work that is part of a transaction: an error in it rolls that back, and is not recorded here.
    To be entered after `join`.
    """

    is_written = False
    """Whether it ended well, and its completion is written: only the commit is left."""

    def join(self, calls: AsyncCalls) -> Self:
        """Let it use `calls`, which are those of an inbox."""
        self._calls = calls
        return self

    async def _begin(self, _: AsyncCalls) -> None:
        await self._handling.begin(self._calls, [self.turn], is_joined=True)

    async def _end(self, held: HeldMessage) -> None:
        if self.turn.error is None:
            await self._handling.end_joined(held.calls, [self.turn])
            self.is_written = True
            reached("before_commit")
        else:
            held.end()


def claimed(
    ledger: Ledger,
    key: Key,
    *,
    fingerprint: str | None = None,
    message: Message | None = None,
    keep_result: KeepResult = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Work:
    """A block of code that runs once for `key`: what `once` is for a function.

    `with claimed(...) as work:` where the block asks `work.is_new` first, and may set
    `work.result`; `async with` in coroutines. `message` is what a probe is given. Raises, when it
    is entered, what a function under `once` raises.
    """
    if not isinstance(key, Key):
        raise ConfigError(f"claimed: {key!r} is not a key; write Key(consumer, message_id)")
    handling = Handling.under(
        ledger, key.consumer, policy, lease, keep_result=keep_result, is_called=True
    )
    turn = Turn(Asked(key.message_id, check_fingerprint(fingerprint), message))
    turn.serializer = handling.serializer_of(None)
    return Work(handling, turn)
