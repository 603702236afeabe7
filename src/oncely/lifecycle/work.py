"""Work: a block of code that runs under a claim, as a context manager; `claimed` makes one."""

import os
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

from oncely._util.crash_points import reached
from oncely.core.durations import Duration
from oncely.core.errors import ConfigError, DuplicateError, FencedError, MessageError
from oncely.core.ids import check_fingerprint
from oncely.core.message import Message, Processing, entered
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.core.turn import Turn, TurnState
from oncely.ledger.driver import Driver, run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.handler_context import context_of
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.results import KeepResult


class Work:
    """A block that runs under a claim, for `with` and `async with`; to be entered once.

    Within it, messages have steps and can be sent. When it is left the claim is completed with
    `result`; an error is recorded first, and raised as it was.
    """

    result: Any = None
    """The result of the block; for a duplicate, the one that was kept."""
    is_settled = False
    """Whether the ledger knows, after the block, how it ended."""

    def __init__(self, lifecycle: Lifecycle, turn: Turn, driver: Driver | None = None) -> None:
        self._lifecycle = lifecycle
        self.turn = turn
        self._driver = driver
        self._pid = os.getpid()

    @property
    def is_new(self) -> bool:
        """Whether the block is to do its work: False for a duplicate."""
        self._check_entered()
        return not self.turn.is_duplicate

    @property
    def claim(self) -> Claim | None:
        """The claim under which the block runs; None for a duplicate and an untracked message."""
        return self.turn.claim

    @property
    def processing(self) -> Processing:
        """What the block can do with the message. Raises DuplicateError for a duplicate."""
        self._check_entered()
        if self.turn.context is None:
            raise DuplicateError(f"{self.turn.message_id!r} was processed before")
        return self.turn.context

    def _check_entered(self) -> None:
        if self.turn.outcome is None:
            raise ConfigError("claimed: nothing is claimed yet; write `with claimed(...) as work:`")

    def __enter__(self) -> Self:
        self._driver = self._driver or self._lifecycle.sync_driver
        try:
            run_inline(self._begin(self._driver))
            return self._enter(self._driver)
        except BaseException:
            self._let_go()
            raise

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        run_inline(self._leave(error))

    async def __aenter__(self) -> Self:
        self._driver = self._driver or self._lifecycle.async_driver
        try:
            await self._begin(self._driver)
            return self._enter(self._driver)
        except BaseException:
            self._let_go()
            raise

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._leave(error)

    async def _begin(self, driver: Driver) -> None:
        """Ask for the message. A request over HTTP waits no longer than it may for the answer."""
        await self._lifecycle.claim(driver, [self.turn])

    def _enter(self, driver: Driver) -> Self:
        turn = self.turn
        if turn.refusal is not None:
            raise turn.refusal
        if turn.is_duplicate:
            self.result = self._lifecycle.given_back(turn)
            self._entered = entered(None)
        else:
            self._entered = entered(context_of(turn, driver, self._lifecycle))
        self._entered.__enter__()
        turn.called()
        return self

    async def _leave(self, error: BaseException | None) -> None:
        turn, unusable = self.turn, None
        try:
            # A forked child that leaves the block leaves the claim to its parent.
            if turn.is_duplicate or self._pid != os.getpid():
                self.is_settled = True
                return
            try:
                if turn.context is not None:
                    turn.context.check_awaited(error)
            except MessageError as forgotten:  # That is a failure, too.
                error = unusable = forgotten
            turn.raised(error)
            if error is None and self._lifecycle.keeps_result:
                turn.returned(self._lifecycle.kept(turn, self.result))
            await self._end(cast(Driver, self._driver))
            if unusable is not None:
                raise unusable
        finally:
            self._entered.__exit__()
            if turn.state < TurnState.ENDED:
                self._let_go()

    def _let_go(self) -> None:
        """Where a signal handler has raised: a claim that is extended for ever is busy for ever."""
        if self.turn.claim is not None:
            self._lifecycle.let_go([self.turn])

    async def _end(self, driver: Driver) -> None:
        """Store the end. Where that fails, the effect has happened all the same: the claim runs
        out, and the message is in doubt. An error is raised only where another worker took the
        message over, or where messages that the block has sent are not stored.
        """
        turn = self.turn
        await self._lifecycle.store(driver, [turn])
        self.is_settled = turn.state is TurnState.STORED and turn.refusal is None
        if self.is_settled:
            return
        sent = turn.sent()
        is_raised = isinstance(turn.refusal, FencedError) or bool(sent)
        if turn.refusal is not None and turn.error is None and is_raised:
            raise turn.refusal


def run_new(work: Work, call: Callable[[], Any]) -> Any:
    """The result of `work`: `call` does it, where the message is not a duplicate."""
    try:
        with work:
            if not work.turn.is_duplicate:
                work.result = call()
    except BaseException:
        # A signal handler may raise just before `with` is left.
        work._let_go()
        raise
    return work.result


async def run_new_async(work: Work, call: Callable[[], Awaitable[Any]]) -> Any:
    """As `run_new`, for an async function."""
    try:
        async with work:
            if not work.turn.is_duplicate:
                work.result = await call()
    except BaseException:
        work._let_go()
        raise
    return work.result


class JoinedWork(Work):
    """Work that is part of the transaction of its driver: an error in it rolls that back, and is
    not recorded here.
    """

    is_written = False
    """Whether it ended well, and its completion is written: only the commit is left."""

    async def _end(self, driver: Driver) -> None:
        if self.turn.error is None:
            await self._lifecycle.store_joined(driver, [self.turn])
            self.is_written = True
            reached("before_commit")
        else:
            self.turn.sent()


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
    lifecycle = Lifecycle.under(
        ledger, key.consumer, policy, lease, keep_result=keep_result, is_called=True
    )
    turn = Turn(key.message_id, check_fingerprint(fingerprint), message)
    turn.serializer = lifecycle.serializer_of(None)
    return Work(lifecycle, turn)
