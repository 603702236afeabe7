"""Calls: what can be asked of a ledger for a message, the same inside a transaction as outside."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from oncely.claiming.request import (
    Metadata,
    Request,
    json_value,
    raise_if_fenced,
    raise_if_refused,
    renewed,
    to_claim,
    to_write,
)
from oncely.claiming.settling import Settler
from oncely.core.commands import (
    ClaimOutcome,
    Complete,
    Confirm,
    CountDelivery,
    Extend,
    Fail,
    Finish,
    Held,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
    Written,
)
from oncely.core.deferred import DeferredMessage
from oncely.core.errors import describe
from oncely.core.message import check_key
from oncely.core.policy import Duration, Finding, Policy, lease_seconds, seconds
from oncely.core.record import Claim, Key, Record
from oncely.stores.base import Inside, Refusal

T = TypeVar("T")


class Calls(ABC):
    """The calls of a ledger that concern messages."""

    @abstractmethod
    def _settle_one(self, request: Request) -> Outcome:
        """The outcome of a single call."""

    @abstractmethod
    def _settle(self, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for each, in order."""

    @abstractmethod
    def _transact(self, work: Callable[[Inside], T]) -> T:
        """What `work` returns, done in one transaction; it may be called again."""

    @property
    @abstractmethod
    def can_defer(self) -> bool:
        """Whether there are transactions. Where not, no message waits, and no step is kept."""

    def _settle_inside(self, inside: Inside, requests: Sequence[Request]) -> list[Outcome]:
        """One outcome for each, as a part of a transaction."""
        return Settler(inside).settle(requests)

    @abstractmethod
    def find(self, key: Key) -> Record | None:
        """The record of `key`, if there is one."""

    # ---- Asking for claims ---------------------------------------------------------------------

    def claim(
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
        """Ask for the right to process the message `key` now.

        `lease` replaces the policy's. A `fingerprint` is compared with the one seen first.
        `metadata` is kept with a record that begins here. `finding` is what a probe found out
        about the record that was `in_doubt`, where the policy's `on_in_doubt` is one; when
        another claim is in doubt by now, it is not about that.
        """
        [request] = to_claim([key], lease, policy, [fingerprint], metadata, finding, in_doubt)
        return cast(ClaimOutcome, self._settle_one(request))

    def claim_many(
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
        """One outcome for each key, in order; one exchange with the store when all are new.

        `metadata` is kept with each record that begins here, or is one for each key.
        Of a key that stands twice, the first is granted and the other finds it busy.
        """
        requests = to_claim(keys, lease, policy, fingerprints, metadata, finding, in_doubt)
        return cast(list[ClaimOutcome], self._settle(requests))

    # ---- With a claim --------------------------------------------------------------------------

    def handled(
        self, claim: Claim, result: Any = None, deferred: Sequence[DeferredMessage] = ()
    ) -> Claim:
        """The handler has succeeded; `deferred` is stored with that, or nothing is.

        `result` is kept, as JSON. Returns the claim as it now stands. Raises FencedError when it
        is not the newest, MessageError when `result` is no JSON, ConfigError where the store
        cannot defer messages.
        """
        mark = MarkHandled(claim, json_value(result))
        if not deferred:
            return renewed(claim, self._call(mark))
        return renewed(claim, self._handle([mark], [deferred])[0])

    def handled_many(
        self,
        claims: Sequence[Claim],
        results: Sequence[Any] | None = None,
        deferred: Sequence[Sequence[DeferredMessage]] | None = None,
    ) -> list[WriteOutcome]:
        """`handled` for each; a claim that is not the newest is answered by Fenced."""
        values = [None] * len(claims) if results is None else map(json_value, results)
        marks = [MarkHandled(claim, value) for claim, value in zip(claims, values, strict=True)]
        if deferred is None or not any(deferred):
            return self._write(marks)
        return self._handle(marks, deferred)

    def _handle(
        self, marks: Sequence[MarkHandled], deferred: Sequence[Sequence[DeferredMessage]]
    ) -> list[WriteOutcome]:
        def work(inside: Inside) -> list[WriteOutcome]:
            outcomes = self._settle_inside(inside, [to_write(mark) for mark in marks])
            written = zip(outcomes, deferred, strict=True)
            kept = [m for outcome, each in written if isinstance(outcome, Written) for m in each]
            if kept:
                inside.defer(kept)
            return cast(list[WriteOutcome], outcomes)

        return self._transact(work)

    def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do. `result` is kept, as JSON.

        Raises FencedError when the claim is not the newest, MessageError when `result` is no
        JSON. To complete again under the same claim is not an error.
        """
        raise_if_fenced(self._call(Complete(claim, json_value(result))))

    def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> list[WriteOutcome]:
        """`complete` for each; a claim that is not the newest is answered by Fenced."""
        if results is None:
            return self._write(map(Complete, claims))
        pairs = zip(claims, map(json_value, results), strict=True)
        return self._write(Complete(claim, value) for claim, value in pairs)

    def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed; after a `final` failure no further try is granted.

        The error's text is kept under "error" in the record's metadata, cut and with passwords
        masked. Raises FencedError when the claim is not the newest.
        """
        raise_if_fenced(self._call(Fail(claim, describe(error), final)))

    def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> list[WriteOutcome]:
        """`fail` for each; a claim that is not the newest is answered by Fenced."""
        pairs = zip(claims, map(describe, errors), strict=True)
        return self._write(Fail(claim, text, final) for claim, text in pairs)

    def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted.

        Raises FencedError when it is not the newest.
        """
        raise_if_fenced(self._call(Release(claim)))

    def release_many(self, claims: Sequence[Claim]) -> list[WriteOutcome]:
        """`release` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(map(Release, claims))

    def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease, counted from now by the store's clock.

        Returns the claim as it now stands; the former one stays good, at the price of one more
        exchange with the store. Raises FencedError when it is not the newest.
        """
        return renewed(claim, self._call(Extend(claim, lease_seconds(lease))))

    def extend_many(self, claims: Sequence[Claim], lease: Duration) -> list[WriteOutcome]:
        """`extend` for each; a claim that is not the newest is answered by Fenced."""
        lease_s = lease_seconds(lease)
        return self._write(Extend(claim, lease_s) for claim in claims)

    def _call(self, command: Held) -> WriteOutcome:
        return cast(WriteOutcome, self._settle_one(to_write(command)))

    def _write(self, commands: Iterable[Held]) -> list[WriteOutcome]:
        requests = [to_write(command) for command in commands]
        return cast(list[WriteOutcome], self._settle(requests))

    # ---- Without a claim -----------------------------------------------------------------------

    def count_delivery(self, key: Key) -> Record:
        """Count a delivery that asks for no claim among the attempts; the record as it then is.

        Raises RefusedError where there is none.
        """
        outcome = self._settle_one(Request(check_key(key), CountDelivery()))
        return cast(Record, raise_if_refused(key, outcome, "there is nothing to count"))

    # ---- Deferred messages ---------------------------------------------------------------------

    def deferred(self, key: Key) -> Sequence[DeferredMessage]:
        """What is not sent yet of what `key` deferred, in the order of sending."""
        check_key(key)
        return self._transact(lambda inside: inside.waiting([key])) if self.can_defer else []

    def take_deferred(
        self, limit: int, hold: Duration, parents: Sequence[Key] | None = None
    ) -> Sequence[DeferredMessage]:
        """At most `limit` messages that can be sent now, in the order of sending; of these
        `parents` alone, where any are named. Nobody else is given them for the time of `hold`.
        """
        hold_s = seconds(hold, "hold")
        return self._transact(lambda inside: inside.take(limit, hold_s, parents))

    def sent(self, messages: Sequence[DeferredMessage]) -> None:
        """A transport has confirmed these: they wait no more, and a message whose last ones they
        were is completed. To say it twice is no error.
        """

        def work(inside: Inside) -> None:
            parents = sorted({message.parent for message in messages})
            # Held: of two that send the last two, one comes after the other.
            inside.load(parents)
            inside.remove(messages)
            self._finish(inside, parents)

        self._transact(work)

    def finish(self, keys: Sequence[Key]) -> None:
        """Complete those that are handled and of which nothing waits to be sent."""

        def work(inside: Inside) -> None:
            inside.load(keys)
            self._finish(inside, keys)

        if self.can_defer:
            self._transact(work)
        else:
            self._settle([Request(key, Finish()) for key in keys])

    def _finish(self, inside: Inside, keys: Sequence[Key]) -> None:
        unsent = {message.parent for message in inside.waiting(keys)}
        done = [Request(key, Finish()) for key in keys if key not in unsent]
        self._settle_inside(inside, done)

    def put_back(self, refusals: Sequence[Refusal]) -> None:
        """A transport has refused these."""
        self._transact(lambda inside: inside.put_back(refusals))

    # ---- Steps ---------------------------------------------------------------------------------

    def steps(self, key: Key) -> Mapping[str, Any]:
        """The results of the finished steps of the message, by their names."""
        check_key(key)
        return self._transact(lambda inside: inside.steps(key)) if self.can_defer else {}

    def keep_step(self, claim: Claim, name: str, result: Any) -> None:
        """Keep the result of a finished step; one that is kept already stays.

        Raises FencedError when the claim is not the newest, MessageError when `result` is no JSON.
        """
        kept = json_value(result)

        def work(inside: Inside) -> None:
            [outcome] = self._settle_inside(inside, [to_write(Confirm(claim))])
            raise_if_fenced(cast(WriteOutcome, outcome))
            inside.keep_step(claim.key, name, kept)

        self._transact(work)
