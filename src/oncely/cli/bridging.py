"""`oncely bridge`: moves a broker's messages into a ledger's queue, or into files for Spark."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from oncely._util.event_log import EventLog
from oncely.cli import options, values
from oncely.cli.opening import opened
from oncely.cli.options import LedgerName, Running
from oncely.cli.tables import put_counts
from oncely.cli.terminal import Progress
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
@options.option("--batch", values.NUMBER, "messages that are stored together", default=1_000)
@options.running
@options.ledger
def bridge(
    at: LedgerName,
    broker: str,
    queue: str,
    into: str | None,
    files: str | None,
    drain: bool,
    batch: int,
    running: Running,
    as_json: bool,
) -> int:
    """Move a broker's messages into a queue of the ledger, or into files, until stopped."""
    from oncely.cli.logs import logged
    from oncely.locations import open_named_source

    with logged(running), _target(at, into, files) as ledger:
        began = time.monotonic()
        with closing(open_named_source(broker, queue)) as source:
            settings = {"queue": into or queue, "files": files, "batch": batch, "drain": drain}
            report = _followed(running, ledger, source=source, **settings)
        counts = {"received": report.received, "stored": report.stored}
        _log.info(
            "the bridge has stopped after %(took_s)s s: received %(received)s, stored %(stored)s",
            extra={
                "event": "bridge_stopped",
                **counts,
                "took_s": round(time.monotonic() - began, 1),
            },
        )
    put_counts(counts, as_json=as_json)
    return 0


@contextmanager
def _target(at: LedgerName, into: str | None, files: str | None) -> Iterator["Ledger | None"]:
    """The ledger; None where the messages go into files, whatever the environment names."""
    if files is None:
        with opened(at) as ledger:
            yield ledger
        return
    typed = click.get_current_context().get_parameter_source("url") is ParameterSource.COMMANDLINE
    for name, is_typed in {"--ledger": typed, "--into": into is not None}.items():
        if is_typed:
            raise ConfigError(f"--files: the messages go into the folder alone; drop {name}")
    yield None


def _followed(running: Running, ledger: "Ledger | None", **settings: Any) -> "BridgeReport":
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
            counts = f"received {report.received:,}  stored {report.stored:,}"
            if report.error is None:
                pulse.reached()
                progress.show(counts)
            else:
                pulse.missed(report.error)
                progress.show(f"{counts}  cannot go on: {report.error}")

        return bridge(ledger=ledger, stop=stop, on_progress=show, **settings)
