"""AsyncCalls: the calls of a ledger that concern messages, as coroutines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from oncely.core.commands import Command, MarkHandled, Outcome
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger.arguments import json_value, renewed
from oncely.ledger.ledger_calls import LedgerCalls
from oncely.ledger.mailbox import Mailbox

T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound=LedgerCalls)


def awaited(
    call: Callable[Concatenate[C, P], T],
) -> Callable[Concatenate["AsyncCalls", P], Coroutine[Any, Any, T]]:
    """The call of that name as a coroutine function, with the same arguments and result."""

    @wraps(call)
    async def method(self: "AsyncCalls", /, *args: P.args, **kwargs: P.kwargs) -> T:
        function: Callable[P, T] = getattr(self._calls, call.__name__)
        return await self.run(partial(function, *args, **kwargs))

    return method


def asked(
    call: Callable[Concatenate[LedgerCalls, P], T],
) -> Callable[Concatenate["AsyncCalls", P], Coroutine[Any, Any, T]]:
    """A call that settles one command, as a coroutine function: it waits in `_settle_one`, and
    takes no thread of the loop.
    """

    @wraps(call)
    async def method(self: "AsyncCalls", /, *args: P.args, **kwargs: P.kwargs) -> T:
        asking: Any = call(cast(Any, self), *args, **kwargs)
        return cast(T, await asking)

    return method


class AsyncCalls(ABC):
    """Each method is the one of LedgerCalls by its name."""

    _calls: LedgerCalls

    @property
    def can_defer(self) -> bool:
        """Whether the store has transactions, and so deferred messages and steps."""
        return self._calls.can_defer

    @property
    def mailbox(self) -> Mailbox:
        """The messages that wait. Its calls may block: hand them to `run`."""
        return Mailbox(self._calls)

    @abstractmethod
    async def _settle_one(self, command: Command) -> Outcome:
        """The outcome of a single call."""

    @abstractmethod
    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function`, which may block, returns."""

    async def _asked(self, command: Command, read: Callable[[Any], T]) -> T:
        return read(await self._settle_one(command))

    # ---- Asking for claims ---------------------------------------------------------------------

    claim = asked(LedgerCalls.claim)
    claim_many = awaited(LedgerCalls.claim_many)

    # ---- With a claim --------------------------------------------------------------------------

    async def handled(
        self, claim: Claim, result: Any = None, deferred: Sequence[WaitingMessage] = ()
    ) -> Claim:
        """The handler has succeeded; `deferred` is stored with that."""
        if deferred:
            return await self.run(self._calls.handled, claim, result, deferred)
        mark = MarkHandled(claim, json_value(result))
        return await self._asked(mark, lambda outcome: renewed(claim, outcome, State.HANDLED))

    handled_many = awaited(LedgerCalls.handled_many)
    write_all = awaited(LedgerCalls.write_all)
    complete = asked(LedgerCalls.complete)
    complete_many = awaited(LedgerCalls.complete_many)
    fail = asked(LedgerCalls.fail)
    fail_many = awaited(LedgerCalls.fail_many)
    release = asked(LedgerCalls.release)
    release_many = awaited(LedgerCalls.release_many)
    extend = asked(LedgerCalls.extend)
    extend_many = awaited(LedgerCalls.extend_many)
    count_delivery = awaited(LedgerCalls.count_delivery)

    # ---- Steps ---------------------------------------------------------------------------------

    steps = awaited(LedgerCalls.steps)
    steps_of = awaited(LedgerCalls.steps_of)
    keep_step = awaited(LedgerCalls.keep_step)
    add_step = awaited(LedgerCalls.add_step)

    async def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return await self.run(self._calls.find, key)
