"""Work: a block of code that runs under a claim, as a context manager; `claimed` makes one."""

import os
from types import TracebackType
from typing import Any, Self

from oncely.async_ledger import SteadyLedger
from oncely.claiming.async_calls import AsyncCalls
from oncely.claiming.inline import InlineCalls, run_inline
from oncely.core.context import Processing, entered
from oncely.core.errors import ConfigError, DuplicateError, MessageError
from oncely.core.message import Message, check_fingerprint
from oncely.core.policy import Duration, Policy
from oncely.core.record import Claim, Key
from oncely.crashpoints import reached
from oncely.handling.around import Asked, Begun, Handling, Kept
from oncely.handling.held_message import HeldMessage
from oncely.ledger import Ledger


class Work:
    """A block that runs under a claim, for `with` and `async with`; to be entered once.

    Within it, messages have steps and can be sent. When it is left the claim is completed with
    `result`; an error is recorded first, and raised as it was.
    """

    result: Any = None
    """What the block came to; of a duplicate, what was kept."""
    is_settled = False
    """Whether the ledger knows, after the block, how it ended."""

    def __init__(self, handling: Handling, asked: Asked) -> None:
        self._handling = handling
        self.asked = asked
        self._pid = os.getpid()
        self._entered = entered(None)
        self._begun_as: Begun | None = None

    @property
    def is_new(self) -> bool:
        """Whether the block is to do its work: False for a duplicate."""
        return not isinstance(self._begun, Kept)

    @property
    def claim(self) -> Claim | None:
        """Under which the block runs; None for a duplicate, and for what is not tracked."""
        return self._begun_as.claim if isinstance(self._begun_as, HeldMessage) else None

    @property
    def processing(self) -> Processing:
        """What the block can do with the message. Raises DuplicateError for a duplicate."""
        if isinstance(self._begun, Kept):
            raise DuplicateError(f"{self.asked.message_id!r} was processed before")
        return self._begun

    @property
    def _begun(self) -> Begun:
        if self._begun_as is None:
            raise ConfigError("claimed: nothing is claimed yet; write `with claimed(...) as work:`")
        return self._begun_as

    def __enter__(self) -> Self:
        self._enter(run_inline(self._begin(InlineCalls(self._handling.ledger))))
        return self

    def __exit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        run_inline(self._leave(error))

    async def __aenter__(self) -> Self:
        self._enter(await self._begin(SteadyLedger(self._handling.ledger)))
        return self

    async def __aexit__(
        self,
        _: type[BaseException] | None,
        error: BaseException | None,
        __: TracebackType | None,
    ) -> None:
        await self._leave(error)

    def _enter(self, begun: Begun) -> None:
        self._begun_as = begun
        if isinstance(begun, Kept):
            self.result = begun.result
            self._entered = entered(None)
        else:
            self._entered = entered(begun)
        self._entered.__enter__()

    async def _leave(self, error: BaseException | None) -> None:
        try:
            # A forked child that leaves the block leaves the claim to its parent.
            if isinstance(self._begun, HeldMessage) and self._pid == os.getpid():
                await self._end(self._begun, error)
            else:
                self.is_settled = True
        finally:
            self._entered.__exit__()

    async def _end(self, held: HeldMessage, error: BaseException | None) -> None:
        if error is None:
            self.is_settled = await self._end_well(held)
        else:
            await self._end_badly(held, error)
            self.is_settled = True

    async def _begin(self, calls: AsyncCalls) -> Begun:
        return await self._handling.begin(calls, self.asked)

    async def _end_well(self, held: HeldMessage) -> bool:
        return await self._handling.end_well(held, self.result)

    async def _end_badly(self, held: HeldMessage, error: BaseException) -> None:
        await self._handling.end_badly(held, error)


class JoinedWork(Work):
    """Work that is part of a transaction: what goes wrong in it undoes that, and is not recorded
    here. To be entered after `join`.
    """

    failed = False
    """Whether it was the work that went wrong, and not the database."""

    def join(self, calls: AsyncCalls) -> Self:
        """Let it ask `calls`, which are those of an inbox."""
        self._calls = calls
        return self

    async def _begin(self, _: AsyncCalls) -> Begun:
        return await self._handling.begin_joined(self._calls, self.asked)

    async def _end_well(self, held: HeldMessage) -> bool:
        try:
            await self._handling.complete(held, held.claim, self.result)
        except MessageError:
            self.failed = True
            raise
        reached("before_commit")
        return True

    async def _end_badly(self, held: HeldMessage, error: BaseException) -> None:
        held.end()
        self.failed = isinstance(error, Exception)


def claimed(
    ledger: Ledger,
    key: Key,
    *,
    fingerprint: str | None = None,
    message: Message | None = None,
    keep_result: bool = False,
    lease: Duration | None = None,
    policy: Policy = Policy(),
) -> Work:
    """A block of code that runs once for `key`: what `once` is for a function.

    `with claimed(...) as work:` where the block asks `work.is_new` first, and may set
    `work.result`; `async with` in coroutines. `message` is what a probe is asked with. Raises, when
    it is entered, what a function under `once` raises.
    """
    if not isinstance(key, Key):
        raise ConfigError(f"claimed: {key!r} is no key; write Key(consumer, message_id)")
    handling = Handling.under(ledger, key.consumer, policy, lease, keep_result=keep_result)
    return Work(handling, Asked(key.message_id, check_fingerprint(fingerprint), message))
