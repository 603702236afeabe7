"""What one Spark task does with its rows in mode `leased`: claim, run, complete, in chunks.

The order of things in a chunk: one claim for all ids; the effects, while a heartbeat extends the
claims; completion under the fence. What an earlier worker left in doubt comes last, one by one.
"""

import time
from collections.abc import Sequence

from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.spark.modes.chunks import ChunkTask
from oncely.spark.modes.row_turn import RowTurn
from oncely.spark.sink.message_rows import Row

_STORE_EVERY_S = 0.5


class LeasedTask(ChunkTask):
    """Hands each message to `handler` while it holds a claim on it."""

    def _process(self, rows: Sequence[Row]) -> None:
        calls = InlineCalls(self._ledger)
        turns = self._turns(rows)
        run_inline(self._handling.begin(calls, turns))
        granted = [turn for turn in turns if turn.held is not None]
        # One of those that an earlier worker left may be what killed it: that is to cost nobody
        # else a try, once more.
        suspects = [turn for turn in granted if _was_left(turn)] if len(granted) > 1 else []
        if suspects:
            run_inline(self._handling.give_back(calls, suspects))
            granted = [turn for turn in granted if not _was_left(turn)]
        # Before the rest, so that nothing there can let these claims run out, or lose them.
        self._run(granted, calls)
        self._count_ended([turn for turn in turns if turn.held is None])
        for turn in suspects:
            self._settle([turn.row])

    def _run(self, granted: Sequence[RowTurn], calls: InlineCalls) -> None:
        """Run the handler for each, in order; count them as their ends are stored.

        What a long chunk has done is stored twice a second. Whatever ends the run early, what was
        done is stored and what was not begun is released.
        """
        first = 0
        stored_at = time.monotonic()
        try:
            for place, turn in enumerate(granted, 1):
                self._channel.raise_if_stopping()
                self._run_one(turn)
                if place == len(granted) or time.monotonic() - stored_at > _STORE_EVERY_S:
                    ended, first = granted[first:place], place
                    run_inline(self._handling.end(calls, ended))
                    self._count_ended(ended)
                    stored_at = time.monotonic()
        except BaseException:
            run_inline(self._handling.end(calls, granted[first:]))
            raise

    def _run_one(self, turn: RowTurn) -> None:
        held = turn.held
        # What is not begun, since its claim may have run out, is given back.
        if held is not None and self._handling.heartbeat.is_good(held.claim):
            turn.run(held, self._handler, keeps_result=self._handling.keeps_result)


def _was_left(turn: RowTurn) -> bool:
    return turn.held is not None and turn.held.claim.takes_over
