"""One Spark task on the messages of a batch whose end is known: each gets the same end.

It claims them under the batch's token, which grants the claims again, or shows that another attempt
has ended them already.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from pyarrow import RecordBatch

from oncely.core.control import Unrecoverable
from oncely.core.record import Key
from oncely.core.verdicts import Phase
from oncely.engine.asking import to_claim
from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.keeping import Keeping
from oncely.lifecycle.turn import Asked, Turn
from oncely.spark.modes.steady import patiently
from oncely.spark.sink.message_rows import Row, numbered, read_chunks
from oncely.spark.sink.sink_options import SinkOptions

_AT_ONCE = "1ms"


class BatchFailed(Unrecoverable):
    """The batch of a message has failed permanently."""


class EndTask:
    """One run over messages of a batch: completes them, or fails them with `error`."""

    def __init__(self, ledger: Ledger, options: SinkOptions, token: int, error: str | None) -> None:
        self._calls = InlineCalls(ledger)
        # The members were checked when they were claimed.
        self._policy = replace(options.policy, on_mismatch="ignore", on_too_old="run")
        keeping = Keeping(options.consumer)
        handling = Handling.under(ledger, options.consumer, self._policy, "none")
        self._handling = replace(handling, keeping=keeping)
        self._options = options
        self._token = token
        self._error = error
        self.ended = 0

    def run(self, batches: Iterable[RecordBatch]) -> None:
        """End every message."""
        for rows in read_chunks(numbered(batches), lambda: self._options.chunk):
            self._end(sorted(rows, key=lambda row: row.id))
            self.ended += len(rows)

    def _end(self, rows: Sequence[Row]) -> None:
        turns = [self._turn(row) for row in rows]
        begin = self._handling.begin
        patiently(lambda: run_inline(begin(self._calls, turns)), self._options.consumer)
        granted = [turn for turn in turns if turn.held is not None]
        for turn in granted:
            turn.phase = Phase.CALLED
            turn.error = None if self._error is None else BatchFailed(self._error)
        run_inline(self._handling.end(self._calls, granted))
        for turn in granted:
            if turn.refusal is not None:
                raise turn.refusal

    def _turn(self, row: Row) -> Turn:
        turn = Turn(Asked(row.id, message=row.message(None)))
        turn.key = Key(self._options.consumer, row.id)
        turn.requests = to_claim(
            [turn.key], "none", self._policy, None, None, None, None, self._token
        )
        return turn


class DoubtTask:
    """One run over messages of a batch that is held in doubt: holds each of them in doubt."""

    def __init__(self, ledger: Ledger, options: SinkOptions, token: int) -> None:
        self._ledger = ledger
        self._options = options
        self._token = token
        self.ended = 0

    def run(self, batches: Iterable[RecordBatch]) -> None:
        """End the lease of every claim."""
        for rows in read_chunks(numbered(batches), lambda: self._options.chunk):
            keys = [Key(self._options.consumer, row.id) for row in rows]
            policy = replace(self._options.policy, on_mismatch="ignore")
            claim = partial(self._ledger.claim_many, sorted(keys), _AT_ONCE, policy)
            patiently(partial(claim, token=self._token), self._options.consumer)
            self.ended += len(rows)
