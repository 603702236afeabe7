"""Judging: when the results of a batch are an error of its write, or worth a warning."""

import warnings

from oncely.core.errors import OncelyError
from oncely.spark.sink.counts import Counts
from oncely.spark.sink.sink_options import SinkOptions


def judge(options: SinkOptions, counts: Counts) -> None:
    """Raise OncelyError if more of a batch failed than `fail_if` or `max_failures` allows.

    The batch then does not count as committed: Spark may repeat it, and the ledger knows it.
    """
    _check_share(options, counts)
    left = counts.new - counts.handled
    is_all = left > 0 and not counts.handled
    text = f"{left:,} of {counts.new:,} new messages were not handled: {counts.in_words()}"
    if (options.fail_if == "all" and is_all) or (options.fail_if == "any" and left):
        raise OncelyError(f'{text} (option fail_if="{options.fail_if}"){_see(options)}')
    # A program that gets the counts can judge them itself.
    if is_all and options.fail_if is None and options.report is None and options.channel is None:
        warnings.warn(f"oncely: {text}{_see(options)}", RuntimeWarning, stacklevel=1)


def _check_share(options: SinkOptions, counts: Counts) -> None:
    """Check only handlers that ran: a batch that had failed before passes."""
    ran = counts.handled + counts.errors
    if options.max_failures is not None and counts.errors > options.max_failures * ran:
        raise OncelyError(
            f"{counts.errors:,} of {ran:,} messages failed, more than the share that option "
            f"max_failures={options.max_failures:g} allows; last error: {counts.last_error}"
            f"{_see(options)}"
        )


def _see(options: SinkOptions) -> str:
    return f"; see: oncely list --consumer {options.consumer} --state failed"
