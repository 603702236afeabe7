"""What Spark's tasks do to the messages of a batch whose end is known: each gets the same end.

They claim them under the batch's token, which grants the claims again, or shows that another
attempt has ended them already.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from pyarrow import RecordBatch

from oncely.core.control import Unrecoverable
from oncely.core.record import Key
from oncely.core.turn import Turn
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.retry_queue import RetryQueue
from oncely.spark.modes.steady import patiently
from oncely.spark.sink.message_rows import numbered, read_chunks
from oncely.spark.sink.sink_options import SinkOptions

_AT_ONCE = "1ms"


class BatchFailed(Unrecoverable):
    """The batch of a message has failed permanently."""


def end_members(
    ledger: Ledger,
    options: SinkOptions,
    token: int,
    batches: Iterable[RecordBatch],
    error: str | None,
) -> int:
    """Complete these messages, or fail them with `error`; return how many."""
    # The members were checked when they were claimed.
    policy = replace(options.policy, on_mismatch="ignore", on_too_old="run")
    lifecycle = Lifecycle.under(ledger, options.consumer, policy, "none")
    lifecycle = replace(lifecycle, retry_queue=RetryQueue(options.consumer))
    ended = 0
    for rows in read_chunks(numbered(batches), lambda: options.chunk):
        turns = []
        for row in sorted(rows, key=lambda row: row.id):
            turn = Turn(row.id, message=row.message(None))
            turn.token = token
            turns.append(turn)
        _end(lifecycle, turns, error)
        ended += len(rows)
    return ended


def _end(lifecycle: Lifecycle, turns: Sequence[Turn], error: str | None) -> None:
    driver = lifecycle.sync_driver
    patiently(lambda: run_inline(lifecycle.claim(driver, turns)), lifecycle.consumer)
    granted = [turn for turn in turns if turn.claim is not None]
    for turn in granted:
        turn.called()
        turn.raised(None if error is None else BatchFailed(error))
    run_inline(lifecycle.store(driver, granted))
    for turn in granted:
        if turn.refusal is not None:
            raise turn.refusal


def doubt_members(
    ledger: Ledger, options: SinkOptions, token: int, batches: Iterable[RecordBatch]
) -> int:
    """Hold these messages in doubt, by ending the leases of their claims; return how many."""
    policy = replace(options.policy, on_mismatch="ignore")
    ended = 0
    for rows in read_chunks(numbered(batches), lambda: options.chunk):
        keys = sorted(Key(options.consumer, row.id) for row in rows)
        claim = partial(ledger.claim_many, keys, _AT_ONCE, policy, token=token)
        patiently(claim, options.consumer)
        ended += len(rows)
    return ended
