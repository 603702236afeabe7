"""Handling: what happens before and after a handler, for one message of a consumer or for many."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Self, TypeVar, cast

from oncely._util import clock
from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.signals import is_process_stopping
from oncely.core.commands import (
    ClaimOutcome,
    Command,
    Complete,
    Duplicate,
    Extend,
    Fail,
    Fenced,
    Granted,
    Handled,
    Held,
    InDoubt,
    MarkHandled,
    Outcome,
    Release,
    WriteOutcome,
    Written,
)
from oncely.core.durations import Duration, lease_seconds
from oncely.core.errors import (
    ConfigError,
    EndedError,
    FencedError,
    MessageError,
    MismatchError,
    OncelyError,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    UnreadableRow,
    describe,
)
from oncely.core.ids import check_id, fingerprint_of
from oncely.core.message import Message
from oncely.core.policy import Finding, Policy
from oncely.core.record import Claim, Key, Record, State, claim_of
from oncely.core.refusals import refusal
from oncely.core.rules import (
    AFTER_DOUBT,
    AFTER_DUPLICATE,
    AFTER_OUTAGE,
    after_end,
    after_refusal,
    after_stop,
    recorded,
)
from oncely.core.verdicts import Delay, Ending, Phase, Told
from oncely.core.waiting import WaitingMessage
from oncely.engine.asking import new_token, to_claim
from oncely.engine.async_calls import AsyncCalls
from oncely.engine.probing import asked_probe
from oncely.engine.request import Write, renewed
from oncely.ledger import Ledger, checked_ledger
from oncely.lifecycle.heartbeat import shared_heartbeat
from oncely.lifecycle.held_message import HeldMessage, Untracked
from oncely.lifecycle.keeping import Keeping
from oncely.lifecycle.patience import AWAY, Holding, Patience
from oncely.lifecycle.results import (
    JSON,
    KeepResult,
    Serializer,
    given_back,
    kept,
    serializer_of,
)
from oncely.lifecycle.retention import StoredRetention
from oncely.lifecycle.turn import Asked, Kept, Turn

_log = EventLog(__name__)

_T = TypeVar("_T", bound=Turn)

_Write = Callable[
    [AsyncCalls, Sequence[Turn], Sequence[Claim]], Awaitable[Sequence[WriteOutcome | Exception]]
]
"""Each outcome, or why that one is not stored."""


@dataclass(kw_only=True)
class Handling:
    """What happens before and after the handlers of one consumer's messages.

    Its coroutines wait for nothing but `calls`: for functions that are not async they run inline.
    """

    ledger: Ledger
    consumer: str
    policy: Policy
    lease_s: float | None
    keeps_result: bool = False
    kept_as: KeepResult = True
    """As what type results are kept, or by what; True where the annotations of handlers say it."""
    forgets_failures: bool = False
    """Whether a handler that fails leaves no record."""
    keeping: Keeping | None = None
    """Which of its messages wait in the ledger; None where the ledger keeps none of them."""
    finishes_handled: bool = True
    """Whether a message that was handled before, and has nothing left to send, is completed when it
    is delivered again."""
    completes: bool = True
    """Whether a handler's success completes the message; else it is marked as handled, and the
    driver completes it."""
    is_stopping: Callable[[], bool] = is_process_stopping
    """Whether this process is being stopped."""
    patience: Patience = field(default_factory=Patience)

    def __post_init__(self) -> None:
        self.heartbeat = shared_heartbeat(self.ledger, self.lease_s)
        self._holding = Holding(self.heartbeat, self.patience)
        self._retention = StoredRetention(self.ledger, self.consumer, self.policy.retention)

    @classmethod
    def under(
        cls,
        ledger: object,
        consumer: str,
        policy: object,
        lease: Duration | None = None,
        *,
        keep_result: KeepResult = False,
        is_called: bool = False,
    ) -> Self:
        """From settings as users write them. Where the handler `is_called` by a caller that
        retries, tries have no limit by default. Raises ConfigError, which says what to write
        instead.
        """
        ledger = checked_ledger(ledger)
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy: {_not_a_policy(policy)}")
        try:
            check_id(consumer, "consumer")
        except MessageError as error:
            raise ConfigError(f'{error}; write consumer="billing"') from None
        return cls(
            ledger=ledger,
            consumer=consumer,
            policy=policy.for_callers() if is_called else policy,
            lease_s=lease_seconds(policy.lease if lease is None else lease),
            keeps_result=bool(keep_result) or policy.results == "keep",
            kept_as=keep_result or True,
        )

    @cached_property
    def followed(self) -> Self:
        """The same for messages of which something is sent by others once they are handled:
        whoever has sent that calls `finish`.
        """
        return replace(self, completes=False, finishes_handled=False)

    def serializer_of(self, function: Callable[..., Any] | None) -> Serializer:
        """What keeps the results of `function`. Raises ConfigError where nothing can."""
        return serializer_of(function, self.kept_as) if self.keeps_result else JSON

    def kept(self, turn: Turn, result: Any) -> Any:
        """What is stored of a handler's result. Made at once: another run may change the object."""
        if not self.keeps_result or turn.key is None:
            return None
        return kept(turn.serializer, result, turn.key)

    def given_back(self, turn: Turn) -> Any:
        """What a duplicate gets."""
        return given_back(turn.serializer, cast(Kept, turn.begun).result, cast(Key, turn.key))

    def keep_retention(self) -> None:
        """Store in the ledger how long the policy keeps records. Not inside a transaction."""
        self._retention.store()

    # ---- Before --------------------------------------------------------------------------------

    async def begin(
        self,
        calls: AsyncCalls,
        turns: Sequence[Turn],
        *,
        is_joined: bool = False,
    ) -> None:
        """Ask for all of these: each is `begun`, its claim extended from now on, or is refused.

        It is safe to ask again for the same turns after an error: each keeps its command. Where it
        `is_joined`, the transaction of `calls`, and not a lease, keeps others away. Raises
        StoreUnavailable where the store cannot be reached, unless the policy lets messages run.
        """
        self._prepare([turn for turn in turns if turn.command is None])
        asking = [turn for turn in turns if turn.is_asking]
        try:
            await self._ask(calls, asking, is_joined=is_joined)
        except StoreUnavailable:
            left = [turn for turn in asking if turn.is_asking]
            if is_joined or not self.runs_untracked(left):
                raise

    def runs_untracked(self, turns: Sequence[Turn]) -> bool:
        """Whether messages may run while the store is away: then these begin so."""
        if self.policy.on_outage == "pause":
            return False
        for turn in turns:
            self._run_untracked(turn, is_outage=True)
        return True

    async def resume(self, calls: AsyncCalls, turn: Turn, fence: int) -> bool:
        """Take over the claim with that fence from a process that has died. Return whether that
        worked: False where another worker has claimed the message since.
        """
        turn.key = key = Key(self.consumer, check_id(turn.asked.message_id))
        asked_at = clock.monotonic()
        record = await calls.find(key)
        if record is None or record.state is not State.PROCESSING or record.fence != fence:
            return False
        claim = claim_of(record)
        [outcome] = await calls.settle([Extend(claim, self.lease_s)])
        if not isinstance(outcome, Written):
            return False
        claim = renewed(claim, outcome)
        turn.outcome = Granted(claim)
        turn.begun = HeldMessage(claim, calls, turn.asked.message, self._holding)
        self.heartbeat.hold([claim], asked_at)
        return True

    async def _ask(self, calls: AsyncCalls, turns: Sequence[Turn], *, is_joined: bool) -> None:
        if not turns:
            return
        asked_at = clock.monotonic()
        try:
            outcomes = await calls.settle([cast(Command, turn.command) for turn in turns])
        except UnreadableRow as error:
            if len(turns) == 1:
                turns[0].refusal = error
                return
            if is_joined:
                raise
            # The row is one of theirs: asking for each alone finds out whose.
            for turn in turns:
                await self._ask(calls, [turn], is_joined=is_joined)
            return
        reached("after_claim")
        self._note(calls, turns, outcomes, is_joined=is_joined)
        granted = [held.claim for turn in turns if (held := turn.held) is not None]
        if granted and not is_joined:
            await self._hold(calls, granted, asked_at)
        handled = [turn for turn in turns if isinstance(turn.outcome, Handled)]
        if handled and self.finishes_handled:
            await self.finish(calls, handled)
        doubted = [turn for turn in turns if self._is_to_be_probed(turn)]
        if doubted:
            await self._ask_probed(calls, doubted, is_joined=is_joined)

    def _note(
        self,
        calls: AsyncCalls,
        turns: Sequence[Turn],
        outcomes: Sequence[Outcome],
        *,
        is_joined: bool,
    ) -> None:
        """Note in the turns what the ledger has answered."""
        holding = None if is_joined else self._holding
        for turn, outcome in zip(turns, outcomes, strict=True):
            turn.outcome = outcome
            match outcome:
                case Granted(claim):
                    turn.begun = HeldMessage(claim, calls, turn.asked.message, holding)
                case Duplicate(record):
                    turn.begun = Kept(record.result)
                case Handled(_, record):
                    turn.begun = Kept(record.result, may_send=True)
                case _ if not self._is_to_be_probed(turn):
                    turn.refusal = refusal(cast(ClaimOutcome, outcome))

    def _is_to_be_probed(self, turn: Turn) -> bool:
        is_in_doubt = isinstance(turn.outcome, InDoubt) and callable(self.policy.on_in_doubt)
        return is_in_doubt and turn.finding is None

    async def _hold(self, calls: AsyncCalls, claims: Sequence[Claim], asked_at: float) -> None:
        try:
            self.heartbeat.hold(claims, asked_at)
            if not self._retention.is_stored:
                await calls.run(self.keep_retention)
        except BaseException:
            newest = self.heartbeat.let_go_many(claims)
            await calls.settle([Release(claim) for claim in newest])
            raise

    async def finish(self, calls: AsyncCalls, turns: Sequence[Turn]) -> None:
        """Complete messages that were handled, and have nothing left to send."""
        keys = [cast(Key, turn.key) for turn in turns]
        try:
            await calls.run(calls.mailbox.finish, keys)
        except AWAY as error:
            # A relay does it later.
            _log.warning(
                "handled messages of '%(consumer)s' could not be marked as completed: %(reason)s; "
                "a relay marks them later",
                error=error,
                extra={"event": "finishing_failed", **self.told_of(turns)},
            )

    async def _ask_probed(
        self, calls: AsyncCalls, turns: Sequence[Turn], *, is_joined: bool
    ) -> None:
        """Ask once more about these, with what the user's probe has found out about each."""
        for turn in turns:
            record = cast(InDoubt, turn.outcome).record
            message = turn.probed() or Message(record.key.message_id)
            turn.finding = await calls.run(asked_probe, self.policy.on_in_doubt, message)
            [turn.command] = self._commands([turn], turn.finding, record)
        await self._ask(calls, turns, is_joined=is_joined)

    # ---- What is asked -------------------------------------------------------------------------

    def key_of(self, asked: Asked) -> Key | None:
        """The key of the message in the ledger; None where it is to run untracked.

        Raises MessageError for an id that cannot be one.
        """
        if asked.message_id or self.policy.on_missing_id == "dead_letter":
            return Key(self.consumer, check_id(asked.message_id))
        if self.policy.on_missing_id == "untracked":
            return None
        if asked.fingerprint is None:
            raise MessageError("missing id, and no content to make a fingerprint of")
        return Key(self.consumer, f"content:{asked.fingerprint}")

    def _prepare(self, turns: Sequence[Turn]) -> None:
        """Make the commands of these. Without a usable key, a message is refused or untracked."""
        asking = [turn for turn in turns if self._is_to_be_asked(turn)]
        try:
            commands = self._commands(asking) if asking else []
        except MessageError as error:
            if len(asking) == 1:
                asking[0].refusal = error
            else:
                # The error is of one of them: preparing each alone finds out which.
                for turn in asking:
                    self._prepare([turn])
            return
        for turn, command in zip(asking, commands, strict=True):
            turn.command = command

    def _is_to_be_asked(self, turn: Turn) -> bool:
        if turn.begun is not None or turn.refusal is not None:
            return False
        try:
            turn.key = turn.key or self.key_of(turn.asked)
        except MessageError as error:
            turn.refusal = error
            return False
        if turn.key is None:
            self._run_untracked(turn)
        return turn.key is not None

    def _commands(
        self,
        turns: Sequence[Turn],
        finding: Finding | None = None,
        doubt: Record | None = None,
    ) -> Sequence[Command]:
        keys = [cast(Key, turn.key) for turn in turns]
        fingerprints = [turn.asked.fingerprint for turn in turns]
        metadata = [turn.asked.metadata for turn in turns]
        kept = metadata if any(metadata) else None
        # One that was set aside and waits again is one that somebody wants to run, however old.
        sent_at = [
            None if turn.taken is not None and turn.taken.reason else turn.sent_at for turn in turns
        ]
        taken = [turn.taken is not None for turn in turns]
        tokens = None
        if any(turn.token is not None for turn in turns):
            tokens = [new_token() if turn.token is None else turn.token for turn in turns]
        return to_claim(
            keys,
            self._lease,
            self.policy,
            fingerprints,
            kept,
            finding,
            doubt,
            tokens,
            sent_at=sent_at,
            taken=taken,
        )

    @cached_property
    def _lease(self) -> Duration:
        return "none" if self.lease_s is None else timedelta(seconds=self.lease_s)

    def _run_untracked(self, turn: Turn, *, is_outage: bool = False) -> None:
        self.ledger.count_untracked(Key(self.consumer, turn.asked.message_id or ""))
        turn.begun = Untracked(turn.asked.message, is_outage=is_outage)

    # ---- After ---------------------------------------------------------------------------------

    async def end(self, calls: AsyncCalls, turns: Sequence[Turn]) -> None:
        """Store how the handlers of these have ended, and set what follows for each: its `ending`.

        While the store is away this is repeated, until the leases are over. A turn whose end could
        not be stored has a `refusal`: another worker took the message over, or it is in doubt.
        """
        for turn in turns:
            if turn.ending is None:
                turn.ending = self.ending_of(turn)
        held = self._to_be_stored(turns)
        is_done = any(map(_is_completed, held))
        keeping = [turn for turn in held if self._keeps_any(turn)]
        if is_done:
            reached("before_completed")
        await self._store(calls, _without(held, keeping), self._write)
        await self._store(calls, keeping, self._write_and_keep)
        if is_done:
            reached("after_completed")

    async def keep(self, calls: AsyncCalls, turns: Sequence[_T]) -> Sequence[_T]:
        """Keep messages that did not run in the ledger: for people, or until they are due. Return
        those of which nothing is stored: they have to be redelivered.
        """
        if self.keeping is None:
            return turns
        try:
            await self._refuse_others(calls, turns)
            rows = [row for turn in turns for row in self.keeping.rows_of(turn)]
            # A message that already waits for its retry goes on waiting.
            waiting = [row for row in rows if not row.is_set_aside]
            dead = [row for row in rows if row.is_set_aside]
            await calls.run(calls.mailbox.keep, waiting, dead, self._rows_in_queue(turns))
        except StoreDenied:
            raise
        except StoreError as error:
            if len(turns) > 1 and not isinstance(error, StoreUnavailable):
                # The error may be of one of them: keeping each alone finds out which.
                return [left for turn in turns for left in await self.keep(calls, [turn])]
            _log.warning(
                "%(count)s messages of '%(consumer)s' could not be stored for a retry, or as dead "
                "letters: %(reason)s; they are redelivered",
                error=error,
                extra={"event": "keeping_failed", **self.told_of(turns)},
            )
            for turn in turns:
                turn.ending = AFTER_DOUBT
            return turns
        for turn in turns:
            self._note_gone(turn)
        return []

    async def _refuse_others(self, calls: AsyncCalls, turns: Sequence[Turn]) -> None:
        """Set aside messages under whose id another message, with other content, waits already."""
        keys = [turn.key for turn in turns if turn.key is not None and turn.refusal is None]
        if not keys or self.policy.on_mismatch == "ignore":
            return
        there = await calls.run(calls.mailbox.retries, keys)
        for turn in turns:
            row = there.get(turn.key) if turn.key is not None and turn.refusal is None else None
            if row is not None and fingerprint_of(row.message.body) != turn.asked.fingerprint:
                turn.refusal = MismatchError(f"{row.id!r} waits with other content")
                turn.ending = after_refusal(turn.refusal)

    async def end_joined(self, calls: AsyncCalls, turns: Sequence[Turn]) -> None:
        """Store in the transaction of `calls` how the handlers of these have ended, none of which
        has failed. Raises EndedError where the transaction has lost a claim.
        """
        for turn in turns:
            turn.ending = self.ending_of(turn)
        keeping = [turn for turn in turns if self._keeps_any(turn)]
        reached("before_completed")
        outcomes: list[WriteOutcome | Exception] = []
        for write, those in (
            (self._write, _without(turns, keeping)),
            (self._write_and_keep, keeping),
        ):
            if those:
                outcomes += await write(calls, those, [_held_by(turn).claim for turn in those])
        if any(isinstance(outcome, Fenced) for outcome in outcomes):
            raise EndedError("the transaction has lost a claim inside the block")
        reached("after_completed")

    async def after_rollback(self, calls: AsyncCalls, turn: Turn, error: BaseException) -> None:
        """The transaction of this turn, its claim included, was undone by `error`: record that
        where it is a failure of the handler.
        """
        if turn.refusal is error:
            turn.ending = after_refusal(turn.refusal)
            return
        if isinstance(error, EndedError) and not error.is_undone and turn.held is not None:
            await self.leave_in_doubt(calls, [turn], error)
            return
        phase, is_failure = turn.phase, self._is_failure(turn, error)
        turn.start_over()
        if not is_failure and isinstance(error, Exception):
            if not self.meets_outage(error):
                _log.warning(
                    "the transaction of message '%(message_id)s' of '%(consumer)s' failed: "
                    "%(reason)s; the message is redelivered",
                    exc_info=error,
                    extra={"event": "transaction_failed", **self.told_of([turn])},
                )
            turn.refusal = error
            turn.ending = after_refusal(error)
            return
        if not is_failure:
            turn.ending = after_stop(self.policy, Phase.STARTED)
            return
        try:
            await self.begin(calls, [turn])
            turn.error, turn.phase = error, phase
            await self.end(calls, [turn])
        except OncelyError as unrecorded:
            self._log_unrecorded([turn])
            turn.error, turn.ending = error, after_refusal(unrecorded)

    async def leave_in_doubt(
        self, calls: AsyncCalls, turns: Sequence[Turn], error: EndedError
    ) -> None:
        """Handlers have ended their transaction themselves, and nobody knows what they committed.
        Claims that are committed are left to run out. Where they are not, new claims are made, with
        the error, and left to run out.
        """
        held = [turn for turn in turns if turn.held is not None]
        for turn in turns:
            turn.start_over()
        for turn in held:
            turn.asked.metadata = {**(turn.asked.metadata or {}), "error": describe(error)}
        try:
            await self.begin(calls, held)
        except StoreError:
            self._log_unrecorded(held)
        self.heartbeat.let_go_many([_held_by(turn).claim for turn in held if turn.held is not None])
        for turn in turns:
            turn.refusal = error
            turn.ending = AFTER_DOUBT
            turn.phase = Phase.STORED

    def meets_outage(self, error: Exception) -> bool:
        """Whether `error` undid a transaction because the database is away, which is noted."""
        is_away = isinstance(error, StoreUnavailable) or self.ledger.is_outage(error)
        if is_away:
            self.patience.outage.met(error, "transactions")
        return is_away

    def told_of(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """What the log says of these."""
        first = turns[0].asked.message_id
        return {"consumer": self.consumer, "message_id": first, "count": len(turns)}

    def _log_unrecorded(self, turns: Sequence[Turn]) -> None:
        _log.exception(
            "the failure of %(count)s messages of '%(consumer)s' could not be recorded: "
            "%(reason)s; they are redelivered, the first is '%(message_id)s'",
            extra={"event": "recording_failed", **self.told_of(turns)},
        )

    def _is_failure(self, turn: Turn, error: BaseException) -> bool:
        """Whether what has undone a transaction is the handler's fault, and not the database's."""
        if not isinstance(error, Exception):
            return not self.is_stopping()
        if turn.phase < Phase.RUNNING:
            return False
        if error is turn.error:
            # Also an error that looks like a transaction that has lost: it came in every try, and
            # may be of another database.
            return True
        is_ours = isinstance(error, OncelyError) and not isinstance(error, EndedError)
        return not (is_ours or self.ledger.is_contention(error))

    async def give_back(self, calls: AsyncCalls, turns: Sequence[Turn]) -> None:
        """Give these back: this process stops before their handlers have ended."""
        held = [turn for turn in turns if turn.held is not None and turn.phase < Phase.STORED]
        for turn in held:
            # In this order: the caller of a handler first notes the call, then asks whether it may.
            _held_by(turn).end()
            turn.ending = after_stop(self.policy, turn.phase)
        await self._store(calls, self._to_be_stored(held), self._write)

    def ending_of(self, turn: Turn) -> Ending:
        """What follows from how far this turn has come."""
        return ending_of(turn, self.policy, is_stopping=self.is_stopping())

    # ---- What is stored ------------------------------------------------------------------------

    def _to_be_stored(self, turns: Sequence[Turn]) -> Sequence[Turn]:
        """The turns whose end is stored; the claims of the others are left to run out."""
        held = [turn for turn in turns if turn.held is not None and turn.phase < Phase.STORED]
        left = [turn for turn in held if cast(Ending, turn.ending).told is Told.NOTHING]
        self.heartbeat.let_go_many([_held_by(turn).claim for turn in left])
        return _without(held, left)

    async def _store(self, calls: AsyncCalls, turns: Sequence[Turn], write: _Write) -> None:
        if not turns:
            return
        claims = [_held_by(turn).claim for turn in turns]

        async def speak() -> Sequence[WriteOutcome | Exception]:
            outcomes = await write(calls, turns, self.heartbeat.newest(claims))
            for outcome in outcomes:
                # If one of many is locked, the others need not be repeated.
                is_raised = isinstance(outcome, Exception) and len(turns) == 1
                if is_raised or isinstance(outcome, StoreUnavailable):
                    raise cast(Exception, outcome)
            return outcomes

        try:
            outcomes = await self.patience.say(
                calls, speak, lambda: self.heartbeat.good_until(claims), is_one=len(turns) == 1
            )
        except StoreError as error:
            if len(turns) > 1 and not isinstance(error, StoreUnavailable):
                # The error may be of one of them: storing each alone finds out which.
                await self._store_each(calls, turns, write)
                return
            self._give_up(turns, error)
        else:
            left = self._note_stored(turns, outcomes)
            if left:
                done = _without(turns, left)
                self.heartbeat.let_go_many([_held_by(turn).claim for turn in done])
                await self._store_each(calls, left, write)
        finally:
            # Also where a signal breaks this off: a claim that is extended for ever is busy for
            # ever.
            self.heartbeat.let_go_many(claims)

    def _note_stored(
        self, turns: Sequence[Turn], outcomes: Sequence[WriteOutcome | Exception]
    ) -> Sequence[Turn]:
        """Note in the turns what is stored; return those of which nothing is."""
        left = []
        for turn, outcome in zip(turns, outcomes, strict=True):
            if isinstance(outcome, Exception):
                left.append(turn)
                continue
            turn.phase = Phase.STORED
            if isinstance(outcome, Fenced):
                turn.refusal = FencedError("another worker has taken the message over")
                turn.ending = after_refusal(turn.refusal)
            else:
                self.note_removed(turn)
        return left

    async def _store_each(self, calls: AsyncCalls, turns: Sequence[Turn], write: _Write) -> None:
        for turn in turns:
            await self._store(calls, [turn], write)

    def _give_up(self, turns: Sequence[Turn], error: StoreError) -> None:
        """The leases are over: what happened is in doubt."""
        _log.error(
            "the end of %(count)s messages of '%(consumer)s' could not be stored before their "
            "leases ran out: %(reason)s; they are in doubt, the first is '%(message_id)s'",
            error=error,
            extra={"event": "storing_failed", **self.told_of(turns)},
        )
        for turn in turns:
            turn.refusal = error
            turn.ending = AFTER_DOUBT
        if isinstance(error, StoreDenied):
            # So would the end of each later message be. These have run, and are not given back.
            for turn in turns:
                turn.phase = Phase.STORED
            raise error

    async def _write(
        self, calls: AsyncCalls, turns: Sequence[Turn], claims: Sequence[Claim]
    ) -> Sequence[WriteOutcome | Exception]:
        pairs = zip(turns, claims, strict=True)
        commands = [self._command(turn, claim) for turn, claim in pairs]
        return cast(list[WriteOutcome | Exception], await calls.settle_each(commands))

    # ---- What was taken from a queue in the same database ----------------------------------------

    def note_removed(self, turn: Turn) -> None:
        """The end of this turn is stored: where its message was taken from a queue in the ledger's
        database, the same commit has removed it there.
        """
        if self._is_removed(turn):
            self._note_gone(turn)

    def _is_removed(self, turn: Turn) -> bool:
        """Whether the end of this turn removes the message from its queue."""
        if turn.queued is None or turn.ending is None:
            return False
        told = turn.ending.told
        return told is Told.COMPLETED or (
            self.keeping is not None and told in (Told.FAILED, Told.EXHAUSTED)
        )

    def _rows_in_queue(self, turns: Sequence[Turn]) -> list[WaitingMessage]:
        """The rows that these were taken from, as far as they are in the ledger's database."""
        queued = [turn.queued for turn in turns if turn.queued is not None]
        return [each.row for each in queued if each.database_id == self.ledger.database_id]

    def _note_gone(self, turn: Turn) -> None:
        if turn.queued is not None and self._rows_in_queue([turn]):
            turn.queued.is_over = True

    # ---- What goes with an end -------------------------------------------------------------------

    def _keeps_any(self, turn: Turn) -> bool:
        """Whether something goes into the mailbox or a queue, or out of it, with the end of this
        turn.
        """
        if self._is_removed(turn) and self._rows_in_queue([turn]):
            return True
        held = _held_by(turn)
        if _is_completed(turn):
            # A message that was delivered again may also wait, from an earlier attempt.
            return bool(held.end()) or (self.keeping is not None and _may_wait(turn))
        told = cast(Ending, turn.ending).told
        return self.keeping is not None and told in (Told.FAILED, Told.EXHAUSTED)

    async def _write_and_keep(
        self, calls: AsyncCalls, turns: Sequence[Turn], claims: Sequence[Claim]
    ) -> Sequence[WriteOutcome | Exception]:
        writes = [self._whole_end(*pair) for pair in zip(turns, claims, strict=True)]
        return await calls.write_all(writes)

    def _whole_end(self, turn: Turn, claim: Claim) -> Write:
        """The write of a turn's end, with what is kept and removed in the same commit."""
        removed = self._rows_in_queue([turn]) if self._is_removed(turn) else ()
        if not _is_completed(turn):
            kept = () if self.keeping is None else self.keeping.rows_of(turn)
            return Write(self._command(turn, claim), kept, removed=removed)
        is_over = self.keeping is not None and _may_wait(turn)
        sent, command = _held_by(turn).end(), self._command(turn, claim)
        if sent:
            command = MarkHandled(claim, turn.result)
        return Write(command, sent, is_over, removed)

    def _command(self, turn: Turn, claim: Claim) -> Held:
        told, verdict, _ = cast(Ending, turn.ending)
        if told is Told.COMPLETED:
            return (Complete if self.completes else MarkHandled)(claim, turn.result)
        if told is Told.RELEASED or self.forgets_failures:
            return Release(claim)
        waits = self.keeping is not None and isinstance(verdict, Delay)
        retry_s = verdict.delay_s if waits and isinstance(verdict, Delay) else None
        return Fail(claim, recorded(turn.error), told is Told.EXHAUSTED, retry_s)


def ending_of(turn: Turn, policy: Policy, *, is_stopping: bool) -> Ending:
    """What follows from how far a turn has come under `policy`."""
    begun, error = turn.begun, turn.error
    if turn.refusal is not None:
        ending = after_refusal(turn.refusal)
        # A claim whose handler then must not run is given back.
        return ending if turn.held is None else ending._replace(told=Told.RELEASED)
    if isinstance(begun, Kept):
        return AFTER_DUPLICATE
    if isinstance(begun, Untracked) and begun.is_outage and error is not None:
        return AFTER_OUTAGE
    held = turn.held
    attempts = turn.deliveries if held is None else held.claim.attempts
    return after_end(policy, attempts, error, turn.phase, is_stopping=is_stopping)


def _held_by(turn: Turn) -> HeldMessage:
    held = turn.held
    assert held is not None  # noqa: S101 - only turns with a claim are stored.
    return held


def _may_wait(turn: Turn) -> bool:
    """Whether its message may wait to be tried again, from an attempt before this one."""
    return turn.taken is not None or _held_by(turn).claim.fence > 1


def _is_completed(turn: Turn) -> bool:
    return turn.ending is not None and turn.ending.told is Told.COMPLETED


def _without(turns: Sequence[Turn], others: Sequence[Turn]) -> Sequence[Turn]:
    left_out = set(others)
    return [turn for turn in turns if turn not in left_out] if others else turns


def _not_a_policy(value: Any) -> str:
    name = getattr(value, "__name__", None)
    if callable(value) and name is not None:
        return f"{name} is a function; write {name}()"
    return f"{type(value).__name__} is not a Policy; write Policy(...), or at_most_once()"
