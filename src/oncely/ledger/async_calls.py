"""AsyncCalls: the calls of a ledger that concern messages, as coroutines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from oncely.core.commands import (
    ClaimOutcome,
    Command,
    Complete,
    Extend,
    Fail,
    Held,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
)
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import describe
from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.waiting import WaitingMessage
from oncely.ledger.arguments import json_value, raise_if_fenced, renewed, to_acquire
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

    # ---- Asking for claims ---------------------------------------------------------------------

    async def claim(
        self,
        key: Key,
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprint: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        finding: Finding | None = None,
        in_doubt: Record | None = None,
        token: int | None = None,
        sent_at: float | None = None,
    ) -> ClaimOutcome:
        """Ask for the right to process the message `key` now."""
        command = to_acquire(
            key, lease, policy, fingerprint, metadata, finding, in_doubt, token, sent_at
        )
        return cast(ClaimOutcome, await self._settle_one(command))

    claim_many = awaited(LedgerCalls.claim_many)

    # ---- With a claim --------------------------------------------------------------------------

    async def handled(
        self, claim: Claim, result: Any = None, deferred: Sequence[WaitingMessage] = ()
    ) -> Claim:
        """The handler has succeeded; `deferred` is stored with that."""
        if deferred:
            return await self.run(self._calls.handled, claim, result, deferred)
        outcome = await self._written(MarkHandled(claim, json_value(result)))
        return renewed(claim, outcome, State.HANDLED)

    handled_many = awaited(LedgerCalls.handled_many)
    write_all = awaited(LedgerCalls.write_all)

    async def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do."""
        raise_if_fenced(await self._written(Complete(claim, json_value(result))))

    complete_many = awaited(LedgerCalls.complete_many)

    async def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed."""
        raise_if_fenced(await self._written(Fail(claim, describe(error), final)))

    fail_many = awaited(LedgerCalls.fail_many)

    async def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted."""
        raise_if_fenced(await self._written(Release(claim)))

    release_many = awaited(LedgerCalls.release_many)

    async def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease."""
        return renewed(claim, await self._written(Extend(claim, lease_seconds(lease))))

    extend_many = awaited(LedgerCalls.extend_many)

    async def _written(self, command: Held) -> WriteOutcome:
        return cast(WriteOutcome, await self._settle_one(command))

    count_delivery = awaited(LedgerCalls.count_delivery)

    # ---- Steps ---------------------------------------------------------------------------------

    steps = awaited(LedgerCalls.steps)
    steps_of = awaited(LedgerCalls.steps_of)
    keep_step = awaited(LedgerCalls.keep_step)
    add_step = awaited(LedgerCalls.add_step)

    async def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return await self.run(self._calls.find, key)
