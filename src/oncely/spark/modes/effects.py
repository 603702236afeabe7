"""The effects of a task: the handler run under claims, and how each run ended, stored."""

import time
from collections.abc import Callable, Sequence

from oncely.claiming.inline import InlineCalls
from oncely.core.commands import WriteOutcome, Written
from oncely.core.errors import OncelyError
from oncely.core.policy import Policy
from oncely.core.record import Claim
from oncely.handling.heartbeat import Heartbeat
from oncely.handling.held_message import HeldMessage
from oncely.ledger import Ledger
from oncely.spark.modes.ends import End, Kind, results_of, run_handler
from oncely.spark.sink.options import Handler
from oncely.spark.sink.rows import Row

_STORE_EVERY_S = 0.5

Granted = tuple[Row, Claim]


class Effects:
    """Runs the handler for what is granted."""

    def __init__(
        self,
        ledger: Ledger,
        policy: Policy,
        handler: Handler,
        raise_if_stopping: Callable[[], None],
    ) -> None:
        self._ledger = ledger
        self._policy = policy
        self._handler = handler
        self._raise_if_stopping = raise_if_stopping
        self._calls = InlineCalls(ledger)
        self._heartbeat = Heartbeat(ledger, policy.lease_s)

    def close(self) -> None:
        """End the heartbeat."""
        self._heartbeat.stop()

    def run(
        self,
        granted: Sequence[Granted],
        asked_at: float,
        settled: Callable[[Sequence[End]], None],
    ) -> None:
        """Run the handler for each, in order; tell `settled` the ends as they are stored.

        `asked_at`: `time.monotonic()` before the claims were asked for. What a long chunk has
        done is stored twice a second. Whatever ends the run early, what was done is stored and
        what was not begun is released.
        """
        self._heartbeat.hold((claim for _, claim in granted), asked_at)
        ends: list[End] = []
        ended = 0
        begun: Claim | None = None
        stored_at = time.monotonic()
        try:
            for row, claim in granted:
                self._raise_if_stopping()
                begun = claim
                ends.append(self._run_one(row, claim))
                begun = None
                ended += 1
                if time.monotonic() - stored_at > _STORE_EVERY_S:
                    settled(self._store(ends))
                    ends = []
                    stored_at = time.monotonic()
            settled(self._store(ends))
        except BaseException:
            # Where storing was what failed, it is tried once more: to store twice does no harm.
            try:
                settled(self._store(ends))
            finally:
                self._give_back([claim for _, claim in granted[ended:]], begun)
            raise

    def _give_back(self, claims: Sequence[Claim], begun: Claim | None) -> None:
        """Release what was not begun; also the one that was, where it may happen twice."""
        ours = self._heartbeat.let_go_many(claims)
        if begun is not None and not self._policy.repeats_doubts:
            del ours[0]
        self._ledger.release_many(ours)

    def _run_one(self, row: Row, claim: Claim) -> End:
        def is_good() -> bool:
            return self._heartbeat.is_good(claim)

        if not is_good():
            return End(row, claim, Kind.UNBEGUN)
        message = row.message(claim)
        held = HeldMessage(claim, self._calls, message, is_good)
        return run_handler(row, held, message, self._handler, self._policy)

    def _store(self, ends: Sequence[End]) -> list[End]:
        """Store the ends, in one exchange for each kind; return them with whether that went well.

        What was done comes first, and no kind keeps another from being stored. Raises the first
        error when all have been tried.
        """
        stored: list[End] = []
        errors: list[OncelyError] = []
        for kind in sorted({end.kind for end in ends}):
            alike = [end for end in ends if end.kind is kind]
            try:
                outcomes = self._store_kind(kind, alike)
            except OncelyError as error:
                errors.append(error)
                continue
            stored += [
                end._replace(stored=isinstance(outcome, Written))
                for end, outcome in zip(alike, outcomes, strict=True)
            ]
        if errors:
            raise errors[0]
        return stored

    def _store_kind(self, kind: Kind, ends: Sequence[End]) -> list[WriteOutcome]:
        claims = self._heartbeat.let_go_many([end.claim for end in ends])
        if kind is Kind.DONE:
            return self._ledger.complete_many(claims, results_of(ends, self._policy))
        if kind is Kind.SENDING:
            deferred = [end.deferred for end in ends]
            return self._ledger.handled_many(claims, results_of(ends, self._policy), deferred)
        if kind is Kind.UNBEGUN:
            return self._ledger.release_many(claims)
        errors = [end.error or "" for end in ends]
        return self._ledger.fail_many(claims, errors, final=kind.is_final)
