"""`oncely pipeline run`: progress while it works, a table or JSON at the end."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncely.cli import options, terminal, values
from oncely.core.errors import ConfigError, OncelyError
from oncely.core.shown import shown
from oncely.stores.names import TABLE_NAME

if TYPE_CHECKING:
    from oncely.spark.sink.counts import Counts, Report


@click.group("pipeline", cls=options.Commands, no_args_is_help=False)
def pipeline() -> None:
    """Run a pipeline on Spark."""


@options.command("run", "oncely pipeline run pipeline.toml --drain", pipeline)
@click.argument("file", metavar="FILE.toml", type=values.FILE, help="the pipeline file")
@options.flag("--drain", "go on until no message of the consumer waits for a retry")
@options.flag(
    "--verbose", "if the run ends with an error, print its tracebacks, of Python and of Java"
)
@options.json_output
@options.url("--ledger", "ledger", "sqlite:///ledger.db", "ONCELY_LEDGER")
@options.option("--table", "NAME", f"the ledger's table  [default: the file's, else {TABLE_NAME}]")
@options.option(
    "--schema", "NAME", "the table's schema  [default: the file's, else the database's]"
)
def run(
    file: str,
    drain: bool,
    verbose: bool,
    as_json: bool,
    ledger: str | None,
    table: str | None,
    schema: str | None,
) -> int:
    """Run the pipeline that a TOML file describes; --ledger, --table and --schema replace the
    file's.
    """
    from oncely.spark.pipeline.config import read_config
    from oncely.spark.pipeline.run import WHOLE_ERRORS, run_pipeline
    from oncely.spark.sink.counts import Counts, Report

    click.get_current_context().obj.verbose = verbose
    config = read_config(Path(file), ledger, table, schema)
    if drain and config.pipeline.handler_batch is not None:
        raise ConfigError(
            "--drain: the next run retries a failed batch of handler_batch; drop --drain"
        )
    if verbose:
        config.spark |= WHOLE_ERRORS
    latest = Counts()

    def show(counts: Counts) -> None:
        nonlocal latest
        latest = counts
        progress.show(_progress_line(counts, progress.took_s))

    def put_report(report: Report) -> None:
        if as_json:
            terminal.put_json(report.as_dict())
        else:
            print(shown(config.pipeline.name))
            terminal.put(terminal.fields_table(rows_of(report), terminal.aligned()))

    with terminal.Progress("starting Spark") as progress:
        try:
            report = run_pipeline(config, show, drains=drain)
        except OncelyError:
            if latest.settled:
                put_report(Report(latest.so_far(), progress.took_s))
            raise
    put_report(report)
    if report.stopped:
        terminal.say("stopped; the next run continues with the messages that are left")
    if report.has_failures:
        name = shlex.quote(config.pipeline.consumer)
        see = f"oncely waiting --consumer {name}; oncely dead groups --consumer {name}"
        terminal.say(f"{report.counts.in_words()}; see: {see}")
    return int(report.has_failures)


def _progress_line(counts: "Counts", took_s: float) -> str:
    if counts.received == 0:
        return f"Spark has started; no messages yet  {took_s:.0f} s"
    known = terminal.totals(counts.as_dict()) | {"to do": counts.received - counts.settled}
    return "  ".join(f"{name} {count:,}" for name, count in known.items()) + f"  {took_s:.0f} s"


def rows_of(report: "Report") -> dict[str, terminal.Cell]:
    """The rows of a report's table; the commonest errors are the last ones."""
    counts = report.counts
    reasons = {f"quarantined: {name}": count for name, count in sorted(counts.quarantined.items())}
    return {
        "received": counts.received,
        "handled": counts.handled,
        "duplicates in the input": counts.duplicates_input,
        "duplicates already in the ledger": counts.duplicates_ledger,
        **(reasons or {"quarantined": 0}),
        "failed": counts.failed,
        "in doubt": counts.in_doubt,
        "waiting": counts.waiting,
        "seconds": f"{report.seconds:.1f}",
        "messages/s": f"{counts.received / max(report.seconds, 0.001):,.0f}",
        **terminal.error_rows(report.as_dict()["errors"]),
    }
