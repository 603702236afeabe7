"""`oncely bridge`: moves a broker's messages into a ledger's queue, or into files for Spark."""

import time
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import click

from oncely._util.event_log import EventLog
from oncely.cli import options
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName, Running
from oncely.cli.progress import Progress
from oncely.cli.tables import put_counts
from oncely.core.errors import ConfigError

if TYPE_CHECKING:
    from oncely.bridge import BridgeReport
    from oncely.ledger.ledger import Ledger

_log = EventLog(__name__)


@options.command("bridge", "oncely bridge env:BROKER_URL --queue orders --files out/messages")
@click.argument("broker", metavar="URL", help="such as amqp://localhost, env:NAME or file:PATH")
@options.option("--queue", "NAME", "the broker's queue", required=True)
@options.option("--into", "NAME", "the ledger's queue  [default: as --queue]")
@options.option("--files", "FOLDER", "write files of JSON lines there, instead of into a ledger")
@options.flag("--drain", "end when the broker's queue is empty")
@options.running
@options.ledger
def bridge(
    at: LedgerName,
    broker: str,
    queue: str,
    into: str | None,
    files: str | None,
    running: Running,
    as_json: bool,
    **settings: Any,
) -> int:
    """Move a broker's messages into a queue of the ledger, or into files, until stopped."""
    from oncely.cli.logs import logged
    from oncely.locations import open_named_source

    if files is not None and into is not None:
        raise ConfigError("--into: there is no ledger with --files; drop one of them")
    began = time.monotonic()
    with (
        logged(running),
        opened(at) if files is None else nullcontext() as ledger,
        closing(open_named_source(broker, queue)) as source,
    ):
        settings |= {"source": source, "queue": into or queue, "files": files}
        stored = _followed(running, ledger, settings)
        _log.info(
            "the bridge has stopped after %(took_s)s s: stored %(stored)s",
            extra={
                "event": "bridge_stopped",
                "stored": stored,
                "took_s": round(time.monotonic() - began, 1),
            },
        )
    put_counts({"stored": stored}, as_json=as_json)
    return 0


def _followed(running: Running, ledger: "Ledger | None", settings: dict[str, Any]) -> int:
    from oncely._util.signals import StopEvent, end_at_once, on_signals
    from oncely.bridge import bridge
    from oncely.cli.monitoring import monitored
    from oncely.consumer.health import Pulse

    started = {"event": "bridge_started"}
    stop, pulse = StopEvent(), Pulse(lambda: _log.info("the bridge has started", extra=started))
    # The bridge asks whether to stop before each batch.
    stop.on_asked = pulse.beat
    with (
        on_signals(stop.set, end_at_once),
        monitored(running, ledger, lambda: {"": pulse.health()}),
        Progress(is_quiet=running.log_format == "json") as progress,
    ):

        def show(report: "BridgeReport") -> None:
            if report.error is None:
                pulse.reached()
            else:
                pulse.missed(report.error)
            away = "" if report.error is None else f"  cannot go on: {report.error}"
            progress.show(f"stored {report.stored:,}{away}")

        return bridge(ledger=ledger, stop=stop, on_progress=show, **settings).stored
