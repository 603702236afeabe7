"""What one Spark task does with its rows in mode `leased`: claim, run, complete, in chunks.

The order of things in a chunk: one claim for all ids; the effects, while a heartbeat extends the
claims; completion under the fence. What an earlier worker left in doubt comes last, one by one.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any

from oncely.consuming.executors import Executor, LoopExecutor, ThreadExecutor
from oncely.core.errors import HandlerDied
from oncely.core.rules import fails_by_death
from oncely.core.verdicts import Phase
from oncely.engine.inline_calls import run_inline
from oncely.ledger import Ledger
from oncely.lifecycle.wrapping import is_async
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.modes.start import Start
from oncely.spark.modes.tally import Aside
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.journal import Entry
from oncely.spark.sink.message_rows import Row
from oncely.spark.sink.sink_options import SinkOptions

_STORE_EVERY_S = 0.5
_AT_ONCE = "1ms"
_OVER_S = 0.05
"""When that is surely over."""


class LeasedTask(ChunkTask):
    """Hands each message to `handler` while it holds a claim on it."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Callable[..., Any],
        aside: Aside,
        channel: TaskChannel,
        start: Start | None = None,
    ) -> None:
        super().__init__(ledger, options, handler, aside, channel, start)
        self._executor: Executor[RowTurn] | None = None
        """What runs handlers that are async, or several at a time."""
        if is_async(handler):
            self._executor = LoopExecutor(self._run_async, options.concurrency)
        elif options.concurrency > 1:
            self._executor = ThreadExecutor(self._run_one, options.concurrency)
        if self._executor is not None:
            self._opened.callback(self._executor.close)

    def _process(self, rows: Sequence[Row]) -> None:
        turns = self._turns(rows)
        self._begin(turns)
        granted = [turn for turn in turns if turn.held is not None]
        # One of those that an earlier worker left may be what killed it: that is to cost nobody
        # else a try, once more.
        suspects = [turn for turn in granted if _was_left(turn)] if len(granted) > 1 else []
        if suspects:
            run_inline(self._handling.give_back(self._calls, suspects))
            granted = [turn for turn in granted if not _was_left(turn)]
        # Before the rest, so that nothing there can let these claims run out, or lose them.
        self._run(granted)
        self._count_ended([turn for turn in turns if turn.held is None])
        for turn in suspects:
            self._settle([turn.row])

    def _inherit(self, row: Row, entry: Entry) -> bool:
        [turn] = self._turns([row])
        if not self._steadily(
            lambda: run_inline(self._handling.resume(self._calls, turn, entry.fence))
        ):
            return False
        assert turn.held is not None  # noqa: S101 - it was just resumed.
        if not entry.has_returned and not fails_by_death(self._policy):
            # Nobody is at work on it any more; what follows is for the policy.
            [claim] = self._handling.heartbeat.let_go_many([turn.held.claim])
            self._steadily(lambda: self._ledger.extend(claim, _AT_ONCE))
            self._channel.wait(time.monotonic() + _OVER_S, self.counts)
            # By its token it would be granted as it was.
            self._lost.add(row.number)
            self._settle([row])
            return True
        if not entry.has_returned and row.number != self._start.culprit:
            # One of several that were at work. Which has killed is found out with each alone; it
            # costs no other a try.
            self._run([turn])
            return True
        turn.phase = Phase.CALLED
        if not entry.has_returned:
            turn.error = HandlerDied(f"its process {self._start.death}")
            turn.asked.message = row.message(turn.held.claim)
        self._end([turn])
        return True

    # ---- Running -------------------------------------------------------------------------------

    def _run(self, granted: Sequence[RowTurn]) -> None:
        """Run the handler for each; count them as their ends are stored.

        What a long chunk has done is stored twice a second. Whatever ends the run early, what was
        done is stored and what was not begun is released.
        """
        unsaved = dict.fromkeys(granted)
        ended: list[RowTurn] = []
        stored_at = time.monotonic()
        try:
            with closing(self._each_run(granted)) as running:
                for turn in running:
                    ended.append(turn)
                    if time.monotonic() - stored_at > _STORE_EVERY_S:
                        self._end(ended)
                        for each in ended:
                            del unsaved[each]
                        ended, stored_at = [], time.monotonic()
            self._end(ended)
        except BaseException:
            run_inline(self._handling.end(self._calls, [*unsaved]))
            raise

    def _end(self, turns: Sequence[RowTurn]) -> None:
        if turns:
            run_inline(self._handling.end(self._calls, turns))
            self._count_ended(turns)

    def _each_run(self, granted: Sequence[RowTurn]) -> Generator[RowTurn, None, None]:
        """Run these; each as its handler has ended. Raises Stopped, when none runs any more."""
        if self._executor is None or not granted:
            for turn in granted:
                self._channel.raise_if_stopping()
                self._run_one(turn)
                yield turn
            return
        running = len(granted)
        self._executor.start(granted)
        try:
            while running:
                if self._channel.stopping.is_set():
                    self._executor.stop()
                ended = self._executor.collect(_STORE_EVERY_S)
                running -= len(ended)
                yield from ended
        finally:
            # How those have ended that still run nobody knows before they have.
            if running:
                self._executor.stop()
            while running:
                running -= len(self._executor.collect(_STORE_EVERY_S))
        self._channel.raise_if_stopping()

    def _run_one(self, turn: RowTurn) -> None:
        if self._may_run(turn) and turn.held is not None:
            turn.run(turn.held, self._handler, keeps_result=self._handling.keeps_result)
            self._note_returned(turn)

    async def _run_async(self, turn: RowTurn) -> None:
        if self._may_run(turn) and turn.held is not None:
            keeps_result = self._handling.keeps_result
            await turn.run_async(turn.held, self._handler, keeps_result=keeps_result)
            self._note_returned(turn)

    def _may_run(self, turn: RowTurn) -> bool:
        held = turn.held
        # What is not begun, since its claim may have run out, is given back.
        if held is None or not self._handling.heartbeat.is_good(held.claim):
            return False
        self._start.journal.begin(turn.row.number, held.claim.fence)
        return True

    def _note_returned(self, turn: RowTurn) -> None:
        is_whole = turn.error is None and turn.result is None
        if is_whole and turn.held is not None and not turn.held.end():
            self._start.journal.returned(turn.row.number)


def _was_left(turn: RowTurn) -> bool:
    return turn.held is not None and turn.held.claim.takes_over
