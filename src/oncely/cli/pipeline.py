"""`oncely pipeline run`: progress while it works, a table or JSON at the end."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from oncely.cli import options, values
from oncely.cli.terminal import Progress, put_json, say
from oncely.core.errors import ConfigError
from oncely.core.shown import shown
from oncely.stores.names import TABLE_NAME

if TYPE_CHECKING:
    from rich.table import Table

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
    from rich.console import Console

    from oncely.spark.pipeline.config import read_config
    from oncely.spark.pipeline.run import WHOLE_ERRORS, run_pipeline

    click.get_current_context().obj.verbose = verbose
    config = read_config(Path(file), ledger, table, schema)
    if drain and config.pipeline.handler_batch is not None:
        raise ConfigError(
            "--drain: the next run retries a failed batch of handler_batch; drop --drain"
        )
    if verbose:
        config.spark |= WHOLE_ERRORS
    with Progress("starting Spark") as progress:
        report = run_pipeline(
            config,
            lambda counts: progress.show(_progress_line(counts, progress.took_s)),
            drains=drain,
        )
    if as_json:
        put_json(report.as_dict())
    else:
        Console().print(report_table(config.pipeline.name, report))
    if report.stopped:
        say("stopped; the next run continues with the messages that are left")
    return int(report.has_failures)


def _progress_line(counts: "Counts", took_s: float) -> str:
    if counts.received == 0:
        return f"Spark has started; no messages yet  {took_s:.0f} s"
    duplicates = counts.duplicates_input + counts.duplicates_ledger
    return (
        f"received {counts.received:,}  handled {counts.handled:,}  duplicates {duplicates:,}  "
        f"quarantined {counts.quarantined.total():,}  failed {counts.failed:,}  "
        f"in doubt {counts.in_doubt:,}  waiting {counts.waiting:,}  "
        f"to do {counts.received - counts.settled:,}  "
        f"{took_s:.0f} s"
    )


def report_table(name: str, report: "Report") -> "Table":
    """The report as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    counts = report.counts
    table = Table(title=Text(shown(name)), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    reasons = {f"quarantined: {name}": count for name, count in sorted(counts.quarantined.items())}
    rows = {
        "received": counts.received,
        "handled": counts.handled,
        "duplicates in the input": counts.duplicates_input,
        "duplicates already in the ledger": counts.duplicates_ledger,
        **(reasons or {"quarantined": 0}),
        "failed": counts.failed,
        "in doubt": counts.in_doubt,
        "waiting": counts.waiting,
    }
    for text, count in rows.items():
        # As text: a handler's words are not markup.
        table.add_row(Text(shown(text)), f"{count:,}", end_section=text in ("received", "waiting"))
    table.add_row("seconds", f"{report.seconds:.1f}")
    table.add_row("messages/s", f"{counts.received / max(report.seconds, 0.001):,.0f}")
    return table
