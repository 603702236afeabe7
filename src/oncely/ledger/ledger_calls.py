"""LedgerCalls: what can be asked of a ledger about messages, inside a transaction as outside."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from oncely._util.chance import new_name
from oncely.core.commands import (
    ClaimOutcome,
    Command,
    Complete,
    Confirm,
    CountDelivery,
    Extend,
    Fail,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
    Written,
)
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import describe
from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record, State, check_key
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.ledger.arguments import (
    Metadata,
    Write,
    json_value,
    raise_if_fenced,
    raise_if_refused,
    renewed,
    to_claim,
    to_extend,
)
from oncely.ledger.settle import Settler
from oncely.stores.store import Transaction

T = TypeVar("T")


class LedgerCalls(ABC):
    """The calls of a ledger that concern messages."""

    def _settle_one(self, command: Command) -> Outcome:
        """The outcome of a single call."""
        return self._settle([command])[0]

    def _asked(self, command: Command, read: Callable[[Any], T]) -> T:
        """What `read` gives for the outcome of a single call."""
        return read(self._settle_one(command))

    @abstractmethod
    def _settle(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """One outcome for each, in order."""

    def _settle_each(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """The same, with an error in the place of an outcome where it concerns that one alone."""
        return self._settle(commands)

    @abstractmethod
    def _transact(self, work: Callable[[Transaction], T]) -> T:
        """What `work` returns, done in one transaction; it may be called again."""

    @property
    @abstractmethod
    def can_defer(self) -> bool:
        """Whether there are transactions. Without them no message waits, and no step is kept."""

    def _settle_in(
        self, transaction: Transaction, commands: Sequence[Command]
    ) -> Sequence[Outcome]:
        """One outcome for each, as a part of a transaction."""
        return Settler(transaction).settle(commands)

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
        token: int | None = None,
        sent_at: float | None = None,
    ) -> ClaimOutcome:
        """Ask for the right to process the message `key` now.

        `lease` replaces the policy's. A `fingerprint` is compared with the one seen first.
        `metadata` is kept with the record, where this call creates it. `finding` is what a probe
        found out about the record that was `in_doubt`, where the policy's `on_in_doubt` is a probe;
        it does not count when another claim is in doubt by now.

        After StoreUnavailable nobody knows whether the claim is granted. Ask again with the same
        `token`, a random number of 39 bits that is drawn for this call: if it was, the answer is
        Granted again.

        `sent_at` is when the message was sent, in seconds since 1970. Where it is known, and the
        policy's `on_too_old` is not "run", a message that may have been handled and forgotten is
        answered by TooOld.
        """
        [command] = to_claim(
            [key], lease, policy, [fingerprint], [metadata], finding, in_doubt, token, [sent_at]
        )
        return cast(ClaimOutcome, self._settle_one(command))

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
        token: int | None = None,
        sent_at: Sequence[float | None] | None = None,
    ) -> Sequence[ClaimOutcome]:
        """One outcome for each key, in order; one exchange with the store when all are new.

        `metadata` is one for all records that this call creates, or a sequence with one for each
        key. Of a key that is given twice, the first is granted, and the other finds it busy. A
        `token` is for the same keys in the same order.
        """
        commands = to_claim(
            keys, lease, policy, fingerprints, metadata, finding, in_doubt, token, sent_at
        )
        return cast(Sequence[ClaimOutcome], self._settle(commands))

    # ---- With a claim --------------------------------------------------------------------------

    def handled(
        self, claim: Claim, result: Any = None, deferred: Sequence[WaitingMessage] = ()
    ) -> Claim:
        """The handler has succeeded; that is stored together with `deferred`, or nothing is.

        `result` is kept, as JSON. Returns the claim as it now stands. Raises FencedError when it
        is not the newest, MessageError when `result` is not JSON, ConfigError where the store
        cannot defer messages.
        """
        mark = MarkHandled(claim, json_value(result))
        if deferred:
            return renewed(claim, self.write_all([Write(mark, deferred)])[0], State.HANDLED)
        return self._asked(mark, lambda outcome: renewed(claim, outcome, State.HANDLED))

    def handled_many(
        self,
        claims: Sequence[Claim],
        results: Sequence[Any] | None = None,
        deferred: Sequence[Sequence[WaitingMessage]] | None = None,
    ) -> Sequence[WriteOutcome]:
        """`handled` for each; a claim that is not the newest is answered by Fenced."""
        values = [None] * len(claims) if results is None else map(json_value, results)
        sent = [()] * len(claims) if deferred is None else deferred
        return self.write_all(
            Write(MarkHandled(claim, value), messages)
            for claim, value, messages in zip(claims, values, sent, strict=True)
        )

    def write_all(self, writes: Iterable[Write]) -> Sequence[WriteOutcome]:
        """Write these commands, and keep and remove the messages of each, in one transaction where
        there are any. A claim that is not the newest is answered by Fenced, and its messages stay
        as they are.
        """
        all_ = [*writes]
        if not any(write.has_rows for write in all_):
            return self._write([write.command for write in all_])

        def work(transaction: Transaction) -> Sequence[WriteOutcome]:
            commands = [write.command for write in all_]
            outcomes = self._settle_in(transaction, commands)
            # A repeated write was stored before, and its messages may be sent by now: they are not
            # kept again.
            pairs = zip(all_, outcomes, strict=True)
            done = [w for w, o in pairs if isinstance(o, Written) and not o.is_repeated]
            keep_anew(transaction, [message for write in done for message in write.kept])
            if over := [write.command.claim.key for write in done if write.is_over]:
                waiting = transaction.waiting(over)
                transaction.remove([row for row in waiting if row.is_retry])
            pairs = zip(all_, outcomes, strict=True)
            removed = [row for w, o in pairs if isinstance(o, Written) for row in w.removed]
            if removed:
                transaction.remove_held(removed)
            return cast(Sequence[WriteOutcome], outcomes)

        return self._transact(work)

    def complete(self, claim: Claim, result: Any = None) -> None:
        """Nothing is left to do. `result` is kept, as JSON.

        Raises FencedError when the claim is not the newest, MessageError when `result` is not
        JSON. To complete again under the same claim is not an error.
        """
        return self._asked(Complete(claim, json_value(result)), _check_stored)

    def complete_many(
        self, claims: Sequence[Claim], results: Sequence[Any] | None = None
    ) -> Sequence[WriteOutcome]:
        """`complete` for each; a claim that is not the newest is answered by Fenced."""
        if results is None:
            return self._write([*map(Complete, claims)])
        pairs = zip(claims, map(json_value, results), strict=True)
        return self._write([Complete(claim, value) for claim, value in pairs])

    def fail(self, claim: Claim, error: BaseException | str, final: bool = False) -> None:
        """The handler has failed; after a `final` failure no further try is granted.

        The error's text is kept under "error" in the record's metadata, cut and with passwords
        masked. Raises FencedError when the claim is not the newest.
        """
        return self._asked(Fail(claim, describe(error), final), _check_stored)

    def fail_many(
        self, claims: Sequence[Claim], errors: Sequence[BaseException | str], final: bool = False
    ) -> Sequence[WriteOutcome]:
        """`fail` for each; a claim that is not the newest is answered by Fenced."""
        pairs = zip(claims, map(describe, errors), strict=True)
        return self._write([Fail(claim, text, final) for claim, text in pairs])

    def release(self, claim: Claim) -> None:
        """Give the claim back as if it had never been granted.

        Raises FencedError when it is not the newest.
        """
        return self._asked(Release(claim), _check_stored)

    def release_many(self, claims: Sequence[Claim]) -> Sequence[WriteOutcome]:
        """`release` for each; a claim that is not the newest is answered by Fenced."""
        return self._write([*map(Release, claims)])

    def extend(self, claim: Claim, lease: Duration) -> Claim:
        """Renew the lease, counted from now by the store's clock.

        Returns the claim as it now stands; the former one stays good, at the price of one more
        exchange with the store. Raises FencedError when it is not the newest.
        """
        return self._asked(Extend(claim, lease_seconds(lease)), partial(renewed, claim))

    def extend_many(self, claims: Sequence[Claim], lease: Duration) -> Sequence[WriteOutcome]:
        """`extend` for each; a claim that is not the newest is answered by Fenced."""
        return self._write(to_extend(claims, lease))

    def _write(self, commands: Sequence[Command]) -> Sequence[WriteOutcome]:
        return cast(Sequence[WriteOutcome], self._settle(commands))

    # ---- Without a claim -----------------------------------------------------------------------

    def count_delivery(self, key: Key) -> Record:
        """Count a delivery that asks for no claim as an attempt; return the record after that.

        Raises RefusedError where there is none.
        """
        outcome = self._settle_one(CountDelivery(check_key(key)))
        return cast(Record, raise_if_refused(key, outcome, "there is nothing to count"))

    # ---- Steps ---------------------------------------------------------------------------------

    def steps(self, key: Key) -> Mapping[str, Any]:
        """The results of the finished steps of the message, by their names."""
        return self.steps_of([key])[key]

    def steps_of(self, keys: Collection[Key]) -> Mapping[Key, Mapping[str, Any]]:
        """The same of several messages."""
        for key in keys:
            check_key(key)
        if not self.can_defer:
            return {key: {} for key in keys}
        found = self._transact(lambda transaction: transaction.steps_of(keys))
        return {key: found.get(key, {}) for key in keys}

    def keep_step(self, claim: Claim, name: str, result: Any) -> None:
        """Keep the result of a finished step; one that is kept already stays.

        Raises FencedError when the claim is not the newest, MessageError when `result` is not JSON.
        """
        kept = json_value(result)

        def work(transaction: Transaction) -> None:
            [outcome] = self._settle_in(transaction, [Confirm(claim)])
            raise_if_fenced(cast(WriteOutcome, outcome))
            transaction.keep_step(claim.key, name, kept)

        self._transact(work)

    def add_step(self, key: Key, name: str, result: Any) -> None:
        """Keep a result beside a record that is handled, under the name of a step; one that is kept
        already stays. It needs no claim. Raises MessageError when `result` is not JSON.
        """
        check_key(key)
        kept = json_value(result)
        self._transact(lambda transaction: transaction.keep_step(key, name, kept))


def keep_anew(transaction: Transaction, messages: Sequence[WaitingMessage]) -> None:
    """Keep these; one that is there already is replaced, except in the outbox."""
    make_room(transaction, messages)
    for renews in (False, True):
        if those := [each for each in messages if (each.queue != OUTBOX) == renews]:
            transaction.keep(those, renews=renews)


def make_room(transaction: Transaction, messages: Sequence[WaitingMessage]) -> None:
    """Let what waits under the keys of these, with another content, have names of its own: it came
    under the same id before the record was forgotten. It was once overwritten, or had the place of
    the new message's dead letter, which was then not kept.
    """
    fresh = {each.key: each for each in messages if each.number is None and each.is_retry}
    if not fresh:
        return
    others = [
        each
        for each in transaction.waiting(fresh.keys())
        if each.is_retry and each.message.body != fresh[each.key].message.body
    ]
    if others:
        transaction.rename([replace(each, name=new_name()) for each in others])


def _check_stored(outcome: WriteOutcome) -> None:
    raise_if_fenced(outcome)
