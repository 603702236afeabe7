"""One Spark task in mode `leased`: claim, run and complete rows, in chunks.

The order of things in a chunk: one claim for all ids; the effects, while a heartbeat extends the
claims; completion under the fence. What an earlier worker left in doubt comes last, one by one.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import cached_property

from oncely.consumer.executor import Executor, LoopExecutor, ThreadExecutor
from oncely.core.commands import Company
from oncely.core.errors import HandlerDied
from oncely.core.turn import fails_by_death
from oncely.ledger.driver import run_inline
from oncely.lifecycle.wrapping import is_async
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.start import Entry

_STORE_EVERY_S = 0.5
_AT_ONCE = "1ms"
_OVER_S = 0.05
"""The time at which that is certainly over."""


class LeasedTask(ChunkTask):
    """Runs `handler` for each message while it holds a claim on the message."""

    @cached_property
    def _executor(self) -> Executor[RowTurn] | None:
        """The executor of async handlers, or of several at a time."""
        executor: Executor[RowTurn]
        if is_async(self._handler):
            executor = LoopExecutor(self._run_async, self._options.concurrency)
        elif self._options.concurrency > 1:
            executor = ThreadExecutor(self._run_one, self._options.concurrency)
        else:
            return None
        self._opened.callback(executor.close)
        return executor

    def _process(self, turns: Sequence[RowTurn]) -> None:
        self._claim_and_run(Company.WINDOW, turns)
        # A message that an earlier worker left may be the one that killed it.
        for turn in [turn for turn in turns if turn.is_suspect]:
            self._channel.raise_if_stopping()
            turn.begins_anew()
            self._claim_and_run(Company.ALONE, [turn])

    def _claim_and_run(self, company: Company, turns: Sequence[RowTurn]) -> None:
        """As `_process`, while that is at risk, too; but for suspects."""
        for turn in turns:
            turn.company = company
        self._steadily(lambda: run_inline(self._lifecycle.claim(self._driver, turns)))
        granted = [turn for turn in turns if turn.claim is not None]
        others = [turn for turn in turns if turn.claim is None and not turn.is_suspect]
        # Before the rest, so that these claims cannot run out, or be lost, during the rest.
        self._run(granted)
        self._count_ended(others)

    def _inherit(self, turn: RowTurn, entry: Entry) -> bool:
        if not self._steadily(
            lambda: run_inline(self._lifecycle.resume(self._driver, turn, entry.fence))
        ):
            return False
        if not entry.has_returned and not fails_by_death(self._policy):
            # No worker processes it any more; the policy decides what follows.
            [claim] = self._lifecycle.let_go([turn])
            self._steadily(lambda: self._ledger.extend(claim, _AT_ONCE))
            self._channel.wait(time.monotonic() + _OVER_S)
            turn.begins_anew()
            return False
        if not entry.has_returned and turn.row.number != self._start.culprit:
            # One of several running handlers. Each runs alone now, to find out which one kills; it
            # costs the others no attempt.
            self._run([turn])
            return True
        turn.called()
        if not entry.has_returned:
            turn.raised(HandlerDied(f"its process {self._start.death}"))
            turn.message = turn.row.message()
        self._end([turn])
        return True

    # ---- Running -------------------------------------------------------------------------------

    def _run(self, granted: Sequence[RowTurn]) -> None:
        """Run the handler for each turn; count the turns as their ends are stored.

        The ends of a long chunk are stored twice a second. If the run ends early, for any reason,
        the ends are stored, and turns that were not begun are released.
        """
        ended: list[RowTurn] = []
        saved: set[RowTurn] = set()
        stored_at = time.monotonic()
        try:
            with closing(self._each_run(granted)) as running:
                for turn in running:
                    ended.append(turn)
                    if time.monotonic() - stored_at > _STORE_EVERY_S:
                        self._end(ended)
                        saved.update(ended)
                        ended, stored_at = [], time.monotonic()
            self._end(ended)
        except BaseException:
            left = [turn for turn in granted if turn not in saved]
            run_inline(self._lifecycle.store(self._driver, left))
            raise

    def _end(self, turns: Sequence[RowTurn]) -> None:
        run_inline(self._lifecycle.store(self._driver, turns))
        self._count_ended(turns)

    def _each_run(self, granted: Sequence[RowTurn]) -> Generator[RowTurn, None, None]:
        """Run these turns; yield each at its end. Raises Stopped, when no handler runs any more."""
        if self._executor is None or not granted:
            for turn in granted:
                self._channel.raise_if_stopping()
                self._run_one(turn)
                yield turn
            return
        running = len(granted)
        self._executor.start(granted)
        try:
            while running and not self._channel.stopping.is_set():
                ended = self._executor.collect(_STORE_EVERY_S)
                running -= len(ended)
                yield from ended
        finally:
            # The ends of running handlers are not known before they have ended.
            if running:
                self._executor.stop()
            while running:
                running -= len(self._executor.collect(_STORE_EVERY_S))
        self._channel.raise_if_stopping()

    def _run_one(self, turn: RowTurn) -> None:
        if self._begins_now(turn):
            with turn.calling(self._driver, self._lifecycle) as message:
                turn.returned(self._lifecycle.kept(turn, self._handler(message)))
            self._note_returned(turn)

    async def _run_async(self, turn: RowTurn) -> None:
        if self._begins_now(turn):
            with turn.calling(self._driver, self._lifecycle) as message:
                turn.returned(self._lifecycle.kept(turn, await self._handler(message)))
            self._note_returned(turn)

    def _begins_now(self, turn: RowTurn) -> bool:
        # A turn that was not begun, as its claim may have run out, is released.
        claim = turn.claim
        if claim is None or not self._lifecycle.heartbeat.is_good(claim):
            return False
        self._start.journal.begin(turn.row.number, claim.fence)
        return True

    def _note_returned(self, turn: RowTurn) -> None:
        if turn.error is None and turn.result is None and not turn.sent():
            self._start.journal.returned(turn.row.number)
