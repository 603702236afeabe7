"""AsyncCalls: the calls of a ledger that concern messages, as coroutines."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from oncely.claiming.calls import Calls
from oncely.claiming.request import (
    Metadata,
    Request,
    json_value,
    raise_if_fenced,
    renewed,
    to_claim,
    to_write,
)
from oncely.core.commands import (
    ClaimOutcome,
    Complete,
    Extend,
    Fail,
    Held,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
)
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import describe
from oncely.core.policy import Duration, Finding, Policy, lease_seconds
from oncely.core.record import Claim, Key, Record
from oncely.stores.base import Refusal

T = TypeVar("T")


class AsyncCalls(ABC):
    """Each method is the one of Calls by its name."""

    _calls: Calls

    @property
    @abstractmethod
    def blocking(self) -> "AsyncCalls | None":
        """The same calls, such that they never wait, for functions that are not async; None where
        these cannot ask.
        """

    @property
    def can_defer(self) -> bool:
        """Whether the store has transactions, and so deferred messages and steps."""
        return self._calls.can_defer

    @abstractmethod
    async def _settle_one(self, request: Request) -> Outcome:
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
    ) -> ClaimOutcome:
        """Ask for the right to process the message `key` now."""
        [request] = to_claim([key], lease, policy, [fingerprint], metadata, finding, in_doubt)
        return cast(ClaimOutcome, await self._settle_one(request))

    async def claim_many(
        self,
        keys: Sequence[Key],
        lease: Duration | None = None,
        policy: Policy = Policy(),
        *,
        fingerprints: Sequence[str | None] | None = None,
        metadata: Metadata = None,
        finding: Finding | None = None,
        in_doubt: Record | None = None,
    ) -> list[ClaimOutcome]:
        """`claim` for each."""
        claim_many = partial(
            self._calls.claim_many,
            fingerprints=fingerprints,
            metadata=metadata,
            finding=finding,
            in_doubt=in_doubt,
        )
        return await self.run(claim_many, keys, lease, policy)

    # ---- With a claim --------------------------------------------------------------------------

    async def handled(
        self, claim: Claim, result: Any = None, deferred: Sequence[DeferredMessage] = ()
    ) -> Claim:
        """The handler has succeeded; `deferred` is stored with that."""
        if deferred:
            return await self.run(self._calls.handled, claim, result, deferred)
        return renewed(claim, await self._written(MarkHandled(claim, json_value(result))))

    async def handled_many(
        self,
        claims: Sequence[Claim],
        results: Sequence[Any] | None = None,
        deferred: Sequence[Sequence[DeferredMessage]] | None = None,
    ) -> list[WriteOutcome]:
        """`handled` for each."""
        return await self.run(self._calls.handled_many, claims, results, deferred)

    async def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do."""
        raise_if_fenced(await self._written(Complete(claim, json_value(result))))

    async def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> list[WriteOutcome]:
        """`complete` for each."""
        return await self.run(self._calls.complete_many, claims, results)

    async def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed."""
        raise_if_fenced(await self._written(Fail(claim, describe(error), final)))

    async def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> list[WriteOutcome]:
        """`fail` for each."""
        return await self.run(self._calls.fail_many, claims, errors, final)

    async def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted."""
        raise_if_fenced(await self._written(Release(claim)))

    async def release_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`release` for each."""
        return await self.run(self._calls.release_many, claims)

    async def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease."""
        return renewed(claim, await self._written(Extend(claim, lease_seconds(lease))))

    async def extend_many(self, claims: Sequence[Claim], lease: Duration) -> list[WriteOutcome]:
        """`extend` for each."""
        return await self.run(self._calls.extend_many, claims, lease)

    async def _written(self, command: Held) -> WriteOutcome:
        return cast(WriteOutcome, await self._settle_one(to_write(command)))

    async def count_delivery(self, key: Key) -> Record:
        """Count a delivery that asks for no claim among the attempts."""
        return await self.run(self._calls.count_delivery, key)

    # ---- Deferred messages and steps -----------------------------------------------------------

    async def deferred(self, key: Key) -> Sequence[DeferredMessage]:
        """What is not sent yet of what `key` deferred, in the order of sending."""
        return await self.run(self._calls.deferred, key)

    async def take_deferred(
        self, limit: int, hold: Duration, parents: Sequence[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        """At most `limit` messages that can be sent now."""
        return await self.run(self._calls.take_deferred, limit, hold, parents)

    async def sent(self, messages: Sequence[DeferredMessage]) -> None:
        """A transport has confirmed these."""
        await self.run(self._calls.sent, messages)

    async def finish(self, keys: Sequence[Key]) -> None:
        """Complete those that are handled and of which nothing waits to be sent."""
        await self.run(self._calls.finish, keys)

    async def put_back(self, refusals: Sequence[Refusal]) -> None:
        """A transport has refused these."""
        await self.run(self._calls.put_back, refusals)

    async def steps(self, key: Key) -> Mapping[str, Any]:
        """The results of the finished steps of the message, by their names."""
        return await self.run(self._calls.steps, key)

    async def keep_step(self, claim: Claim, name: str, result: Any) -> None:
        """Keep the result of a finished step."""
        await self.run(self._calls.keep_step, claim, name, result)

    async def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""
        return await self.run(self._calls.find, key)
