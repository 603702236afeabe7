"""Lifecycle: a message's claim, and how its end is stored; for one message or for many."""

import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Self, TypeVar, cast

from oncely._util import clock
from oncely._util.crash_points import reached
from oncely._util.event_log import EventLog
from oncely._util.outage import Outage
from oncely._util.signals import is_process_stopping
from oncely.core.commands import (
    Acquire,
    ClaimOutcome,
    Company,
    Complete,
    Doubt,
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
    Suspect,
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
    UnstorableMessage,
    describe,
)
from oncely.core.ids import check_id, fingerprint_of
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State, claim_of
from oncely.core.turn import Progress, Turn, TurnState, recorded
from oncely.core.verdicts import KEPT, Counted, Delay, End, Ending
from oncely.core.waiting import QueuedRow, WaitingMessage
from oncely.ledger.arguments import (
    Write,
    acquire_again,
    acquire_for,
    new_token,
    renewed,
    to_claim,
)
from oncely.ledger.async_ledger import AsyncDriver
from oncely.ledger.driver import Driver, SyncDriver
from oncely.ledger.ledger import Ledger, checked_ledger
from oncely.ledger.mailbox import Mailbox
from oncely.ledger.probing import probe_answer
from oncely.lifecycle.heartbeat import (
    AWAY,
    ENDLESS_S,
    PAUSE_S,
    shared_heartbeat,
    store_outage,
)
from oncely.lifecycle.results import (
    JSON,
    KeepResult,
    Serializer,
    given_back,
    kept,
    serializer_of,
)
from oncely.lifecycle.retention import StoredRetention
from oncely.lifecycle.retry_queue import RetryQueue

_log = EventLog(__name__)

_T = TypeVar("_T", bound=Turn)
_R = TypeVar("_R")

_claim_of: Callable[[Turn], Claim | None] = attrgetter("claim")
_claim_in: Callable[[Write], Claim] = attrgetter("command.claim")
_command_of: Callable[[Turn | Write], Any] = attrgetter("command")


@dataclass(kw_only=True)
class Lifecycle:
    """What happens before and after the handlers of one consumer's messages.

    Its coroutines wait for nothing but the driver that they are given: with `sync_driver` they run
    inline.
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
    retry_queue: RetryQueue | None = None
    """Where its messages wait in the ledger; None where the ledger keeps none of them."""
    finishes_handled: bool = True
    """Whether a message that was handled before, and has nothing left to send, is completed when it
    is delivered again."""
    completes: bool = True
    """Whether a handler's success completes the message; else it is marked as handled, and the
    driver completes it."""
    stop: threading.Event | None = None
    """What stops the handlers, besides a signal to this process."""
    grace_s: float = math.inf
    """Seconds that are left once they are stopped."""
    outage: Outage = field(default_factory=store_outage)
    """Is noted while the store is away."""

    def __post_init__(self) -> None:
        self.heartbeat = shared_heartbeat(self.ledger, self.lease_s)
        self._stopped_by = math.inf
        """When the grace is over."""
        self.sync_driver = SyncDriver(self.ledger)
        self.async_driver = AsyncDriver(self.ledger)
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
            name = getattr(policy, "__name__", None)
            if callable(policy) and name is not None:
                raise ConfigError(f"policy: {name} is a function; write {name}()")
            raise ConfigError(
                f"policy: {type(policy).__name__} is not a Policy; write Policy(...), or "
                "at_most_once()"
            )
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

    def is_stopping(self) -> bool:
        """Whether this process, or what runs the handlers, is being stopped."""
        return is_process_stopping() if self.stop is None else self.stop.is_set()

    def serializer_of(self, function: Callable[..., Any] | None) -> Serializer:
        """What keeps the results of `function`. Raises ConfigError where nothing can."""
        return serializer_of(function, self.kept_as) if self.keeps_result else JSON

    def kept(self, turn: Turn, result: Any) -> Any:
        """What is stored of a handler's result. Made at once: another run may change the object."""
        if not self.keeps_result or turn.key is None:
            return None
        return kept(turn.serializer or JSON, result, turn.key)

    def given_back(self, turn: Turn) -> Any:
        """What a duplicate gets."""
        return given_back(turn.serializer or JSON, turn.kept, cast(Key, turn.key))

    def keep_retention(self) -> None:
        """Store in the ledger how long the policy keeps records. Not inside a transaction."""
        self._retention.store()

    # ---- Claims --------------------------------------------------------------------------------

    async def claim(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Ask for all of these: each is granted, and its claim extended from now on, or it is a
        duplicate, or refused.

        It is safe to ask again for the same turns after an error: each keeps its command. Raises
        StoreUnavailable where the store cannot be reached, unless the policy lets messages run.
        """
        asking = []
        for turn in turns:
            # One that has ended must not seem to be granted.
            if turn.state is TurnState.NEW or turn.state >= TurnState.ENDED:
                self._prepare(turn)
            if turn.state is TurnState.ASKED:
                asking.append(turn)
        if not asking:
            return
        try:
            await self._ask(driver, asking)
        except StoreUnavailable:
            if driver.is_joined or not self.run_untracked(asking):
                raise

    def run_untracked(self, turns: Sequence[Turn]) -> bool:
        """Whether messages may run while the store is away; those without an answer then do."""
        if self.policy.on_outage == "pause":
            return False
        for turn in turns:
            if turn.state <= TurnState.ASKED:
                self._run_untracked(turn, is_outage=True)
        return True

    def _run_untracked(self, turn: Turn, *, is_outage: bool = False) -> None:
        self.ledger.count_untracked(Key(self.consumer, turn.message_id or ""))
        turn.runs_untracked(is_outage=is_outage)

    def key_of(self, turn: Turn) -> Key | None:
        """The key of the message in the ledger; None where it is to run untracked.

        Raises MessageError for an id that cannot be one.
        """
        if turn.message_id or self.policy.on_missing_id == "dead_letter":
            return Key(self.consumer, check_id(turn.message_id))
        if self.policy.on_missing_id == "untracked":
            return None
        if turn.fingerprint is None:
            raise MessageError("missing id, and no content to make a fingerprint of")
        return Key(self.consumer, f"content:{turn.fingerprint}")

    def _prepare(self, turn: Turn) -> None:
        """Make the command that asks for a message. Without a usable key it is refused, or runs
        untracked.
        """
        try:
            key = turn.key or self.key_of(turn)
            if key is None:
                self._run_untracked(turn)
            else:
                turn.asks(acquire_for(turn, key, self.policy, self.lease_s))
        except MessageError as error:
            turn.refused(error)

    async def _ask(self, driver: Driver, turns: Sequence[Turn]) -> None:
        asked_at = clock.monotonic()
        outcomes: Sequence[Outcome | Exception]
        try:
            outcomes = await driver.settle([*map(_command_of, turns)])
        except StoreError as error:
            if len(turns) > 1:
                raise
            outcomes = [error]
        reached("after_claim")
        granted, handled, doubted, failed = self._note_answers(turns, outcomes)
        if granted and not driver.is_joined:
            await self._hold(driver, granted, asked_at)
        if handled and self.finishes_handled:
            await self.finish(driver, handled)
        for turn, record in doubted:
            message = turn.probed() or Message(record.key.message_id)
            answer = await driver.run(probe_answer, self.policy.on_in_doubt, message)
            turn.asks(acquire_again(turn, answer.finding, record))
        if failed:
            await self._note_failures(driver, turns, failed)
        if doubted:
            await self._ask(driver, [turn for turn, _ in doubted])

    def _note_answers(
        self, turns: Sequence[Turn], outcomes: Sequence[Outcome | Exception]
    ) -> tuple[list[Claim], list[Turn], list[tuple[Turn, Record]], list[tuple[Turn, Exception]]]:
        """Note in the turns what the ledger has answered. Return the claims that it has granted,
        the turns that were handled before, those that a probe has to find out about, with their
        records, and those that have no answer, with the errors.
        """
        granted, handled, doubted, failed = [], [], [], []
        may_probe = callable(self.policy.on_in_doubt)
        for turn, outcome in zip(turns, outcomes, strict=True):
            match outcome:
                case Granted(claim):
                    turn.granted(claim)
                    granted.append(claim)
                case InDoubt(record) if may_probe and cast(Acquire, turn.command).finding is None:
                    doubted.append((turn, record))
                case Suspect():
                    turn.suspected(outcome)
                case Exception():
                    failed.append((turn, outcome))
                case _:
                    turn.answered(cast(ClaimOutcome, outcome))
                    if isinstance(outcome, Handled):
                        handled.append(turn)
        return granted, handled, doubted, failed

    async def _note_failures(
        self, driver: Driver, turns: Sequence[Turn], failed: Sequence[tuple[Turn, Exception]]
    ) -> None:
        """Refuse those of which the error concerns that message alone; raise any other error."""
        are_of_one = not driver.is_joined and any(type(error) is StoreError for _, error in failed)
        if are_of_one and len(failed) == len(turns):
            are_of_one = await self._takes_another(driver)
        for turn, error in failed:
            if isinstance(error, UnreadableRow):
                turn.refused(error)
            elif are_of_one and type(error) is StoreError:
                turn.refused(UnstorableMessage(f"{turn.message_id!r}: {error}"))
            else:
                if not isinstance(error, AWAY):
                    # Nobody asks again for the others: their claims run out.
                    self.let_go(turns)
                raise error

    async def _takes_another(self, driver: Driver) -> bool:
        """Whether the store takes a claim that is as usual as can be; it is given back."""
        key = Key(self.consumer, f"oncely-{new_token():x}")
        try:
            [outcome] = await driver.settle(to_claim([key], None, self.policy))
            if isinstance(outcome, Granted):
                await driver.settle([Release(outcome.claim)])
        except StoreError:
            return False
        return isinstance(outcome, Granted)

    async def _hold(self, driver: Driver, claims: Sequence[Claim], asked_at: float) -> None:
        try:
            self.heartbeat.hold(claims, asked_at)
            if not self._retention.is_stored:
                await driver.run(self.keep_retention)
        except BaseException:
            newest = self.heartbeat.let_go(claims)
            await driver.settle([Release(claim) for claim in newest])
            raise

    async def finish(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Complete messages that were handled, and have nothing left to send."""
        keys = [cast(Key, turn.key) for turn in turns]
        try:
            await driver.run(Mailbox(driver.calls).finish, keys)
        except AWAY as error:
            # A relay does it later.
            _log.warning(
                "handled messages of '%(consumer)s' could not be marked as completed: %(reason)s; "
                "a relay marks them later",
                error=error,
                extra={"event": "finishing_failed", **self.logged_of(turns)},
            )

    async def resume(self, driver: Driver, turn: Turn, fence: int) -> bool:
        """Take over the claim with that fence from a process that has died. Return whether that
        worked: False where another worker has claimed the message since.
        """
        turn.key = key = Key(self.consumer, check_id(turn.message_id))
        asked_at = clock.monotonic()
        record = await driver.run(driver.calls.find, key)
        if record is None or record.state is not State.PROCESSING or record.fence != fence:
            return False
        claim = claim_of(record)
        [outcome] = await driver.settle([Extend(claim, self.lease_s)])
        if not isinstance(outcome, Written):
            return False
        claim = renewed(claim, outcome)
        turn.granted(claim)
        self.heartbeat.hold([claim], asked_at)
        return True

    # ---- Ends ----------------------------------------------------------------------------------

    async def store(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Store how the handlers of these have ended, each as its `ending` says.

        While the store is away this is repeated, until the leases are over. A turn whose end could
        not be stored has a `refusal`: another worker took the message over, or it is in doubt.
        """
        plain: list[tuple[Turn, Write]] = []
        with_rows: list[tuple[Turn, Write]] = []
        is_done = False
        try:
            for pair in self._writes(turns):
                (with_rows if pair[1].has_rows else plain).append(pair)
                is_done = is_done or not isinstance(pair[1].command, Release | Fail | Doubt)
            if is_done:
                reached("before_completed")
            for pairs in (plain, with_rows):
                if pairs:
                    await self._store(driver, pairs)
            if is_done:
                reached("after_completed")
        finally:
            # Also where a signal breaks this off: a claim that is extended for ever is busy for
            # ever.
            self.let_go(turns)

    async def retried(
        self, driver: Driver, claims: Sequence[Claim], attempt: Callable[[], Awaitable[_R]]
    ) -> _R:
        """What `attempt` returns, which writes about messages that ran, as soon as the store
        answers.

        Raises StoreUnavailable or ContentionError when the claims run out before that, by this
        process's clock. Of several claims it raises ContentionError at once: the others must not
        wait for the contended one.
        """
        away = AWAY if len(claims) == 1 else AWAY[:1]
        tries_until = None
        while True:
            try:
                answer = await attempt()
            except away as error:
                now = clock.monotonic()
                tries_until = tries_until or now + ENDLESS_S
                if self.stop is not None and self.stop.is_set():
                    self._stopped_by = min(self._stopped_by, now + self.grace_s)
                until = self.heartbeat.good_until(claims)
                until = tries_until if until == math.inf else until
                if now + PAUSE_S >= min(until, self._stopped_by):
                    raise
                if isinstance(error, StoreUnavailable):
                    # A record that is contended keeps no other from being written.
                    self.outage.met(error, "ends")
            else:
                self.outage.over("ends")
                return answer
            await driver.pause(PAUSE_S)

    async def store_joined(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Store in the transaction of `driver` how the handlers of these have ended, none of which
        has failed. Raises EndedError where the transaction has lost a claim, and FencedError where
        one was given back meanwhile: its effect must not be committed without it.
        """
        reached("before_completed")
        writes = [write for _, write in self._writes(turns)]
        if any(turn.ending and turn.ending.counted is Counted.GIVEN_BACK for turn in turns):
            raise FencedError("the message was given back before its handler had ended")
        outcomes = await driver.run(driver.calls.write_all, writes)
        if any(isinstance(outcome, Fenced) for outcome in outcomes):
            raise EndedError("the transaction has lost a claim inside the block")
        reached("after_completed")

    def note_committed(self, turns: Sequence[Turn]) -> None:
        """The transaction in which the ends of these are stored is committed."""
        reached("after_commit")
        self.outage.over("transactions")
        self.let_go([turn for turn in turns if turn.claims_ahead])
        for turn in turns:
            self.end(turn)
            if turn.refusal is None:
                turn.stored()
                if removed := self._removed(turn):
                    removed.is_over = True

    async def give_back(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Give these back: this process stops before their handlers have ended."""
        running = [turn for turn in turns if turn.state is TurnState.HELD]
        try:
            for turn in running:
                turn.stopped(self.policy)
            if writes := self._writes(running):
                await self._store(driver, writes)
        finally:
            self.let_go(running)

    def end(self, turn: Turn) -> Ending:
        """End a turn, unless it has ended. Returns what follows."""
        if turn.ending is not None:
            return turn.ending
        is_stopping = turn.error is not None and self.is_stopping()
        return turn.ended(self.policy, is_stopping=is_stopping)

    def _writes(self, turns: Sequence[Turn]) -> list[tuple[Turn, Write]]:
        """End these: what is stored of each. Claims of which nothing is stored run out."""
        writes = []
        for turn in turns:
            ending = self.end(turn)
            if turn.claim is None or turn.state is TurnState.STORED or ending.end is End.LEFT:
                continue
            writes.append((turn, self._write(turn, turn.claim, ending)))
        return writes

    async def _store(self, driver: Driver, pairs: Sequence[tuple[Turn, Write]]) -> None:
        turns, writes = zip(*pairs, strict=True)
        claims = [*map(_claim_in, writes)]
        try:
            outcomes = await self.retried(
                driver, claims, partial(self._try_to_store, driver, writes, claims)
            )
        except StoreError as error:
            if len(pairs) == 1 or isinstance(error, StoreUnavailable):
                self._give_up(turns, error)
                return
            # The error may be of one of them: storing each alone finds out which.
            left = pairs
        else:
            left = self._note_stored(pairs, outcomes)
        if left:
            # The others are not extended meanwhile.
            self.let_go([turn for turn in turns if turn.state is TurnState.STORED])
        for pair in left:
            await self._store(driver, [pair])

    async def _try_to_store(
        self, driver: Driver, writes: Sequence[Write], claims: Sequence[Claim]
    ) -> Sequence[Outcome | Exception]:
        """The outcome of each; or why that one is not stored, where that concerns it alone."""
        for write, claim in zip(writes, self.heartbeat.newest(claims), strict=True):
            write.command.claim = claim
        if writes[0].has_rows:
            return await driver.run(driver.calls.write_all, writes)
        outcomes = await driver.settle([*map(_command_of, writes)])
        for outcome in outcomes:
            # If one of many is locked, the others need not be repeated.
            is_raised = isinstance(outcome, Exception) and len(writes) == 1
            if is_raised or isinstance(outcome, StoreUnavailable):
                raise cast(Exception, outcome)
        return outcomes

    def _note_stored(
        self,
        pairs: Sequence[tuple[Turn, Write]],
        outcomes: Sequence[Outcome | Exception],
    ) -> Sequence[tuple[Turn, Write]]:
        """Note in the turns what is stored; return those of which nothing is."""
        left = []
        for pair, outcome in zip(pairs, outcomes, strict=True):
            turn = pair[0]
            if isinstance(outcome, Exception):
                left.append(pair)
            elif isinstance(outcome, Fenced):
                turn.fenced()
                self.heartbeat.lost(pair[1].command.claim)
            else:
                turn.stored()
                if turn.queued is not None and (removed := self._removed(turn)):
                    removed.is_over = True
        return left

    def let_go(self, turns: Sequence[Turn]) -> Sequence[Claim]:
        """Extend the claims of these no longer; return them as they were last extended."""
        return self.heartbeat.let_go([*filter(None, map(_claim_of, turns))])

    def _give_up(self, turns: Sequence[Turn], error: StoreError) -> None:
        """The leases are over: what happened is in doubt."""
        _log.error(
            "the end of %(count)s messages of '%(consumer)s' could not be stored before their "
            "leases ran out: %(reason)s; they are in doubt, the first is '%(message_id)s'",
            error=error,
            extra={"event": "storing_failed", **self.logged_of(turns)},
        )
        for turn in turns:
            turn.left_in_doubt(error)
        if isinstance(error, StoreDenied):
            # So would the end of each later message be.
            raise error

    def _write(self, turn: Turn, claim: Claim, ending: Ending) -> Write:
        """What is stored of a turn's end: its command, and what is kept and removed with it."""
        sent = turn.sent()
        queued = None if turn.queued is None else self._removed(turn)
        removed = () if queued is None else (queued.row,)
        if ending.end is End.COMPLETED:
            is_completed = self.completes and not sent
            command: Held = (Complete if is_completed else MarkHandled)(claim, turn.result)
            # A message that was delivered again may also wait, from an earlier attempt.
            is_over = self.retry_queue is not None and (turn.taken is not None or claim.fence > 1)
            return Write(command, sent, is_over, removed)
        is_doubt = ending.end is End.IN_DOUBT
        if ending.end is End.RELEASED or (self.forgets_failures and not is_doubt):
            return Write(Release(claim), removed=removed)
        queue, verdict = self.retry_queue, ending.verdict
        retry_s = verdict.delay_s if queue is not None and isinstance(verdict, Delay) else None
        command = Fail(claim, recorded(turn.error), ending.end is End.EXHAUSTED, retry_s)
        if is_doubt:
            command = Doubt(claim, recorded(turn.error))
        return Write(command, () if queue is None else queue.rows_of(turn), removed=removed)

    # ---- What was taken from a queue in the same database ----------------------------------------

    def _queued(self, turn: Turn) -> QueuedRow | None:
        """The row that the message was taken from, where that is in the ledger's database."""
        row = turn.queued
        return row if row is not None and row.database_id == self.ledger.database_id else None

    def _removed(self, turn: Turn) -> QueuedRow | None:
        """The same, where the commit that ends this turn removes it."""
        end = turn.ending.end if turn.ending else End.LEFT
        is_removed = end is End.COMPLETED or (self.retry_queue is not None and end in KEPT)
        return self._queued(turn) if is_removed else None

    # ---- Messages that did not run -------------------------------------------------------------

    async def put_aside(self, driver: Driver, turns: Sequence[_T]) -> Sequence[_T]:
        """Keep messages that did not run in the ledger: for people, or until they are due. Return
        those of which nothing is stored: they have to be redelivered.
        """
        if self.retry_queue is None:
            return turns
        try:
            await self._refuse_others(driver, turns)
            # A message that already waits for its retry goes on waiting; and a dead letter that is
            # there already has the error.
            waiting: list[WaitingMessage] = []
            dead: list[WaitingMessage] = []
            for turn in turns:
                for row in self.retry_queue.rows_of(turn):
                    is_new = row.is_set_aside and not turn.is_known_dead
                    (dead if is_new else waiting).append(row)
            queued = [*filter(None, map(self._queued, turns))]
            taken = [each.row for each in queued]
            await driver.run(Mailbox(driver.calls).keep, waiting, dead, taken)
        except StoreDenied:
            raise
        except StoreError as error:
            is_away = isinstance(error, StoreUnavailable)
            if len(turns) > 1 and not is_away:
                # The error may be of one of them: keeping each alone finds out which.
                return [left for turn in turns for left in await self.put_aside(driver, [turn])]
            if not is_away and isinstance(turns[0].refusal, UnstorableMessage):
                return turns  # Its broker has dead letters, too.
            _log.warning(
                "%(count)s messages of '%(consumer)s' could not be stored for a retry, or as dead "
                "letters: %(reason)s; they are redelivered",
                error=error,
                extra={"event": "keeping_failed", **self.logged_of(turns)},
            )
            for turn in turns:
                turn.left_in_doubt()
            return turns
        for each in queued:
            each.is_over = True
        return []

    async def _refuse_others(self, driver: Driver, turns: Sequence[Turn]) -> None:
        """Set aside messages under whose id another message, with other content, waits already."""
        keys = [turn.key for turn in turns if turn.key is not None and turn.refusal is None]
        if not keys or self.policy.on_mismatch == "ignore":
            return
        there = await driver.run(Mailbox(driver.calls).retries, keys)
        for turn in turns:
            row = there.get(turn.key) if turn.key is not None and turn.refusal is None else None
            if row is not None and fingerprint_of(row.message.body) != turn.fingerprint:
                turn.ended_by(MismatchError(f"{row.id!r} waits with other content"))

    # ---- Transactions that were undone -----------------------------------------------------------

    async def after_rollback(self, driver: Driver, turn: Turn, error: BaseException) -> None:
        """The transaction of this turn, with the claim that was made in it, was undone by `error`:
        record that where it is a failure of the handler. Raises UnstorableMessage where the store
        does not take the message.
        """
        if turn.refusal is error:
            turn.ended_by(turn.refusal)
            return
        if isinstance(error, EndedError) and not error.is_undone and turn.claim is not None:
            await self.leave_in_doubt(driver, [turn], error)
            return
        is_failure = self._is_failure(turn, error)
        turn.undone()
        if is_failure:
            await self.record_failure(driver, turn, error)
        elif isinstance(error, Exception):
            is_away = self.meets_outage(error) or isinstance(error, AWAY)
            if turn.claim is None and not is_away:
                await self._check_storable(driver, turn)
            if not is_away:
                _log.warning(
                    "the transaction of message '%(message_id)s' of '%(consumer)s' failed: "
                    "%(reason)s; the message is redelivered",
                    exc_info=error,
                    extra={"event": "transaction_failed", **self.logged_of([turn])},
                )
            if turn.claim is None:
                turn.ended_by(error)
            else:
                turn.refused(error)
        else:
            turn.started()
            turn.stopped(self.policy)

    async def _check_storable(self, driver: Driver, turn: Turn) -> None:
        """End a turn whose claim has failed in a transaction, where the ledger does not take the
        message by itself, either. Raises that.
        """
        with suppress(StoreError):
            await self.claim(driver, [turn])
        if isinstance(turn.refusal, UnstorableMessage):
            turn.ended_by(turn.refusal)
            raise turn.refusal
        await self.give_back(driver, [turn])
        turn.begins_anew()

    async def record_failure(self, driver: Driver, turn: Turn, error: BaseException) -> None:
        """Claim a message whose handler has failed, of which nothing is stored, and store that."""
        try:
            await self.claim(driver, [turn])
            turn.called()
            turn.raised(error)
            await self.store(driver, [turn])
        except OncelyError as unrecorded:
            is_away = isinstance(error, Exception) and self.ledger.is_outage(error)
            # An outage that has undone the transaction, and goes on, is told once.
            if not (is_away and self.meets_outage(unrecorded)):
                self._log_unrecorded([turn])
            turn.raised(error)
            turn.ended_by(unrecorded)

    async def leave_in_doubt(
        self, driver: Driver, turns: Sequence[Turn], error: EndedError
    ) -> None:
        """Handlers have ended their transaction themselves, and nobody knows what they committed.
        Claims that are committed are left to run out. Where they are not, new claims are made, with
        the error, and left to run out.
        """
        held = [turn for turn in turns if turn.claim is not None]
        self.let_go(held)
        if len(held) == 1:
            held[0].company = Company.ALONE  # It was no other message.
        # One that was committed ahead is asked for with its token, and so granted again: it is in
        # doubt when it has run out, which otherwise it would not be.
        ahead = {turn: turn.claim.birth for turn in held if turn.claims_ahead and turn.claim}
        for turn in turns:
            turn.begins_anew()
            turn.token, turn.claims_ahead = ahead.get(turn), False
        for turn in held:
            turn.metadata = {**(turn.metadata or {}), "error": describe(error)}
        try:
            await self.claim(driver, held)
        except StoreError:
            self._log_unrecorded(held)
        self.let_go(held)
        for turn in turns:
            turn.left_in_doubt(error)

    def meets_outage(self, error: Exception) -> bool:
        """Whether `error` undid a transaction because the database is away, which is noted."""
        is_away = isinstance(error, StoreUnavailable) or self.ledger.is_outage(error)
        if is_away:
            self.outage.met(error, "transactions")
        return is_away

    def logged_of(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """What the log says of these."""
        first = turns[0].message_id
        return {"consumer": self.consumer, "message_id": first, "count": len(turns)}

    def _log_unrecorded(self, turns: Sequence[Turn]) -> None:
        _log.exception(
            "the failure of %(count)s messages of '%(consumer)s' could not be recorded: "
            "%(reason)s; they are redelivered, the first is '%(message_id)s'",
            extra={"event": "recording_failed", **self.logged_of(turns)},
        )

    def _is_failure(self, turn: Turn, error: BaseException) -> bool:
        """Whether what has undone a transaction is the handler's fault, and not the database's."""
        if not isinstance(error, Exception):
            return not self.is_stopping()
        if turn.progress < Progress.RUNNING:
            return False
        if error is turn.error:
            # Also an error that looks like a transaction that has lost: it came in every try, and
            # may be of another database.
            return True
        if turn.ending is not None and self.ledger.is_outage(error):
            # The handler has ended well: only the commit was left, which met a full disk, say.
            return False
        is_ours = isinstance(error, OncelyError) and not isinstance(error, EndedError)
        return not (is_ours or self.ledger.is_contention(error))
