"""`oncely consume`: runs a consumer, in this process or in several that are supervised."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Any, NamedTuple

import click

from oncely.cli import options, values
from oncely.cli.options import LedgerName, RunOptions
from oncely.cli.terminal import put_counts

_INSTEAD = "instead of the module's own, such as env:NAME or file:PATH"


class ConsumeOptions(NamedTuple):
    """What was typed."""

    consumer: str
    ledger: LedgerName
    transport: str | None
    workers: int
    drain: bool
    running: RunOptions
    as_json: bool


@options.command("consume", "oncely consume app:consumer --workers 4 --metrics-port 9464")
@click.argument("consumer", metavar="module:consumer", help="importable from the current folder")
@options.option(
    "--workers", values.NUMBER, "worker processes; one that dies is restarted", default=1
)
@options.flag("--drain", "end when nothing is waiting, delayed or in flight")
@options.running
@options.json_output
# Not from the environment: a ledger that is set there for the other commands would replace the
# consumer's own without a word, and with it all that the consumer knows.
@options.bundle(
    "at",
    LedgerName,
    options.option("--ledger", "URL", _INSTEAD, "url"),
    options.table,
    options.schema,
)
@options.option("--transport", "URL", _INSTEAD)
# Between a supervisor and its workers.
@click.option("--lifeline", type=int, hidden=True)
@click.option("--worker", type=int, hidden=True)
def consume(at: LedgerName, lifeline: int | None, worker: int | None, **typed: Any) -> int:
    """Run a consumer until stopped, or until its queue is empty."""
    from oncely.cli.consuming import run, work

    chosen = ConsumeOptions(ledger=at, **typed)
    # Handlers' own output goes to stderr: stdout is for the one JSON object.
    with redirect_stdout(sys.stderr) if chosen.as_json else nullcontext():
        if lifeline is not None:
            return work(chosen, lifeline, worker)
        report = run(chosen)
    put_counts(report.counts(), report.errors, as_json=chosen.as_json)
    # Without --drain the user stops it, and that is success: the failures are in the report.
    return int(chosen.drain and bool(report.failed or report.dead_lettered))
