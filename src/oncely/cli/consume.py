"""`oncely consume`: runs a consumer, in this process or in several that are supervised."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import NamedTuple

import click

from oncely.cli import options, values
from oncely.cli.options import LedgerName, Running
from oncely.cli.tables import counts_table, put
from oncely.cli.terminal import put_json


class ConsumeOptions(NamedTuple):
    """What was typed, but for --json."""

    consumer: str
    ledger: LedgerName
    transport: str | None
    workers: int
    drain: bool
    running: Running


@click.command(
    "consume", epilog=options.example("oncely consume app:consumer --workers 4 --metrics-port 9464")
)
@click.argument("consumer", metavar="module:consumer", help="importable from the current folder")
@click.option(
    "--workers", type=values.NUMBER, default=1, help="worker processes; one that dies is restarted"
)
@click.option("--drain", is_flag=True, help="end when nothing is waiting, delayed or in flight")
@options.running
@options.json_output
# Not from the environment: a ledger that is set there for the other commands would replace the
# consumer's own without a word, and with it all that the consumer knows.
@click.option(
    "--ledger", metavar="URL", help="instead of the module's own, such as env:NAME or file:PATH"
)
@options.table
@options.schema
@click.option(
    "--transport", metavar="URL", help="instead of the module's own, such as env:NAME or file:PATH"
)
# Between a supervisor and its workers.
@click.option("--lifeline", type=int, hidden=True)
@click.option("--worker", type=int, hidden=True)
def consume(
    consumer: str,
    workers: int,
    drain: bool,
    running: Running,
    as_json: bool,
    ledger: str | None,
    table: str,
    schema: str | None,
    transport: str | None,
    lifeline: int | None,
    worker: int | None,
) -> int:
    """Run a consumer until stopped, or until its queue is empty."""
    from oncely.cli.consuming import run, work

    at = LedgerName(ledger, table, schema)
    chosen = ConsumeOptions(consumer, at, transport, workers, drain, running)
    # Handlers' own output goes to stderr: stdout is for the one JSON object.
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if lifeline is not None:
            return work(chosen, lifeline, worker)
        counts = run(chosen, as_json=as_json)
    if as_json:
        put_json(counts)
    else:
        put(counts_table(counts))
    # Without --drain the user stops it, and that is success: the failures are in the report.
    return int(drain and bool(counts["failed"] or counts["dead_lettered"]))
