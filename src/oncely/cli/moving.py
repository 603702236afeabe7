"""`oncely relay` sends deferred messages; `oncely bridge` moves a broker's into a ledger's queue,
or into files for Spark.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from oncely import ops
from oncely._util.event_log import EventLog
from oncely.cli import options, values
from oncely.cli.opening import opened, opened_transport
from oncely.cli.options import LedgerName, Note, RunOptions
from oncely.cli.terminal import Progress, put_counts, say, tell_audit
from oncely.core.errors import ConfigError
from oncely.core.shown import span

if TYPE_CHECKING:
    from oncely._util.signals import StopEvent
    from oncely.bridge import BridgeReport
    from oncely.consumer.health import Pulse
    from oncely.ledger.ledger import Ledger
    from oncely.outbox import Relay, RelayReport

_log = EventLog(__name__)

_LOOK_EVERY_S = 1.0


@contextmanager
def _followed(
    running: RunOptions, ledger: "Ledger | None", pulse: "Pulse"
) -> Iterator[tuple["StopEvent", Progress]]:
    """For a block that works until it is stopped: it beats each time that it asks whether to stop,
    and shows how far it is.
    """
    from oncely._util.signals import StopEvent, end_at_once, on_signals
    from oncely.cli.monitoring import monitored

    stop = StopEvent()
    stop.on_asked = pulse.beat
    with (
        on_signals(stop.set, end_at_once),
        monitored(running, ledger, lambda: {"": pulse.health()}),
        Progress(is_quiet=running.log_format == "json") as progress,
    ):
        yield stop, progress


@options.command("relay", "oncely relay --ledger env:LEDGER_URL --transport env:BROKER_URL")
@options.url("--transport", "transport", "sqlite:///queue.db", "ONCELY_TRANSPORT")
@options.flag("--drain", "end when nothing more can be sent")
@options.option("--batch", values.NUMBER, "messages taken in one batch", default=100)
@options.option(
    "--poll",
    values.TIME,
    "how often to look for messages, also without a notification",
    default="1s",
)
@options.option(
    "--tries", values.NUMBER, "attempts before a refused message is set aside", default=10
)
@options.flag(
    "--retry-set-aside", "retry set-aside messages first; --why and --by are logged with it"
)
@options.flag("--create-queues", "create missing queues, instead of setting their messages aside")
@options.note
@options.running
@options.ledger
def relay(
    at: LedgerName,
    transport: str | None,
    drain: bool,
    retry_set_aside: bool,
    note: Note,
    running: RunOptions,
    as_json: bool,
    **settings: Any,
) -> int:
    """Send deferred messages until stopped, or until nothing more can be sent."""
    from oncely.cli.logs import logged
    from oncely.cli.monitoring import observed
    from oncely.outbox import Relay

    with logged(running), opened(at) as ledger, opened_transport(transport) as broker:
        began = time.monotonic()
        if retry_set_aside:
            found = ops.retry_every_unsent(ledger, **note)
            say(f"set-aside messages to retry: {found.changed:,}")
            tell_audit(found.audit_error)
        if running.metrics_port is not None:
            observed(ledger)
        report = _relayed(Relay(ledger, broker, **settings), ledger, running, drain=drain)
        counts = {
            "sent": report.sent,
            "refused": report.refused,
            "set_aside": report.set_aside,
            "waiting": ledger.mailbox.backlog().waiting,
        }
        took_s = round(time.monotonic() - began, 1)
        _log.info(
            "the relay has stopped after %(took_s)s s: sent %(sent)s, refused %(refused)s, "
            "set aside %(set_aside)s, waiting %(waiting)s",
            extra={"event": "relay_stopped", **counts, "took_s": took_s},
        )
    put_counts(counts, report.errors, as_json=as_json)
    return int(drain and report.error is not None)


def _relayed(
    relay: "Relay", ledger: "Ledger", running: RunOptions, *, drain: bool
) -> "RelayReport":
    from oncely.consumer.health import Pulse
    from oncely.stores.store import Backlog

    pulse = Pulse()
    with _followed(running, ledger, pulse) as (stop, progress):
        backlog, look_at = Backlog(waiting=0, set_aside=0, lag_s=0.0), 0.0

        def show(report: "RelayReport") -> None:
            nonlocal backlog, look_at
            sent = f"sent {report.sent:,}  "
            if report.is_away:
                pulse.missed(f"{report.error}")
                # The store itself may be unavailable: it is not asked for a count.
                progress.show(f"{sent}cannot go on: {report.error}")
                return
            pulse.reached()
            if time.monotonic() >= look_at:
                # The ledger counts what waits now and then.
                backlog, look_at = ledger.mailbox.backlog(), time.monotonic() + _LOOK_EVERY_S
            progress.show(
                f"{sent}refused {report.refused:,}  set aside {report.set_aside:,}  "
                f"waiting {backlog.waiting:,}  lag {span(backlog.lag_s)}"
            )

        _log.info("the relay has started", extra={"event": "relay_started"})
        return (relay.drain if drain else relay.run)(stop, show)


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
    running: RunOptions,
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
        stored = _bridged(running, ledger, settings)
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


def _bridged(running: RunOptions, ledger: "Ledger | None", settings: dict[str, Any]) -> int:
    from oncely.bridge import bridge
    from oncely.consumer.health import Pulse

    started = {"event": "bridge_started"}
    pulse = Pulse(lambda: _log.info("the bridge has started", extra=started))
    with _followed(running, ledger, pulse) as (stop, progress):

        def show(report: "BridgeReport") -> None:
            if report.error is None:
                pulse.reached()
            else:
                pulse.missed(report.error)
            away = "" if report.error is None else f"  cannot go on: {report.error}"
            progress.show(f"stored {report.stored:,}{away}")

        return bridge(ledger=ledger, stop=stop, on_progress=show, **settings).stored
