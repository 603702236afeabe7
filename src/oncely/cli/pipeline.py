"""`oncely pipeline run`: progress while it works, a table or JSON at the end."""

import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from oncely.cli.terminal import shown
from oncely.spark.config import read_config
from oncely.spark.counts import Counts
from oncely.spark.pipeline import Report, run_pipeline

_LINE_EVERY_S = 5.0


def run(file: str, ledger: str | None, *, as_json: bool) -> int:
    """Run the pipeline; return 1 where messages failed or are in doubt, else 0."""
    config = read_config(Path(file), ledger)
    with _Progress(Console(stderr=True)) as progress:
        report = run_pipeline(config, progress.show)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        Console().print(report_table(config.pipeline.name, report))
    if report.stopped:
        print("stopped; what was not through is taken up by the next run", file=sys.stderr)
    return int(report.has_failures)


class _Progress:
    """A counter in place on a terminal; elsewhere a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._said_at = time.monotonic()
        self._spinner = Spinner("dots", "starting Spark")
        self._live = Live(self._spinner, console=console, transient=True)

    def __enter__(self) -> "_Progress":
        if self._console.is_terminal:
            self._live.start()
        else:
            print("starting Spark", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, counts: Counts) -> None:
        """Show where the run stands."""
        now = time.monotonic()
        text = _progress_line(counts, now - self._began)
        if self._console.is_terminal:
            self._spinner.update(text=text)
        elif now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            print(text, file=sys.stderr, flush=True)


def _progress_line(counts: Counts, took_s: float) -> str:
    duplicates = counts.duplicates_input + counts.duplicates_ledger
    return (
        f"received {counts.received:,}  handled {counts.handled:,}  duplicates {duplicates:,}  "
        f"quarantined {counts.quarantined.total():,}  failed {counts.failed:,}  "
        f"in doubt {counts.in_doubt:,}  waiting {counts.received - counts.settled:,}  "
        f"{took_s:.0f} s"
    )


def report_table(name: str, report: Report) -> Table:
    """The report as a table for a terminal."""
    counts = report.counts
    table = Table(title=Text(shown(name)), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("received", f"{counts.received:,}", end_section=True)
    table.add_row("handled", f"{counts.handled:,}")
    table.add_row("duplicates in the input", f"{counts.duplicates_input:,}")
    table.add_row("duplicates already in the ledger", f"{counts.duplicates_ledger:,}")
    for reason, count in sorted(counts.quarantined.items()):
        # As text: what a handler says is not markup.
        table.add_row(Text(shown(f"quarantined: {reason}")), f"{count:,}")
    if not counts.quarantined:
        table.add_row("quarantined", "0")
    table.add_row("failed", f"{counts.failed:,}")
    table.add_row("in doubt", f"{counts.in_doubt:,}", end_section=True)
    table.add_row("seconds", f"{report.seconds:.1f}")
    table.add_row("messages/s", f"{counts.received / max(report.seconds, 0.001):,.0f}")
    return table
