"""What one Spark task does with its rows in mode `leased`: claim, run, complete, in chunks.

The order of things in a chunk: one claim for all ids; the effects, while a heartbeat extends the
claims; completion under the fence. What an earlier worker left in doubt comes last, one by one.
"""

import time
from collections.abc import Sequence

from oncely.core.commands import Granted
from oncely.core.record import Claim, State
from oncely.ledger import Ledger
from oncely.spark.modes.chunks import ChunkTask, Doubt
from oncely.spark.modes.effects import Effects
from oncely.spark.sink.channel import TaskChannel
from oncely.spark.sink.options import Handler, SinkOptions
from oncely.spark.sink.quarantine import Quarantine
from oncely.spark.sink.rows import Row


class LeasedTask(ChunkTask):
    """Hands each message to `handler` while it holds a claim on it."""

    def __init__(
        self,
        ledger: Ledger,
        options: SinkOptions,
        handler: Handler,
        quarantine: Quarantine,
        channel: TaskChannel,
    ) -> None:
        super().__init__(ledger, options, quarantine, channel)
        self._effects = Effects(ledger, self._policy, handler, channel.raise_if_stopping)
        self._opened.callback(self._effects.close)

    def _process(self, rows: Sequence[Row], doubt: Doubt | None) -> None:
        asked_at = time.monotonic()
        answers = self._ask(self._ledger, rows, doubt)
        granted = [(row, said.claim) for row, said in answers if isinstance(said, Granted)]
        # One of those that an earlier worker left may be what killed it: that is to cost nobody
        # else a try, once more.
        suspects = [pair for pair in granted if _was_left(pair[1])] if len(granted) > 1 else []
        if suspects:
            self._ledger.release_many([claim for _, claim in suspects])
            granted = [pair for pair in granted if not _was_left(pair[1])]
        # Before the rest, so that nothing there can let these claims run out, or lose them.
        self._effects.run(granted, asked_at, self._count_ends)
        self._count_refused(answers, doubt)
        for row, _ in suspects:
            self._settle([row])


def _was_left(claim: Claim) -> bool:
    return claim.former is not None and claim.former.state is State.PROCESSING
