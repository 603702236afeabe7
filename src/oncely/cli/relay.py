"""`oncely relay`: sends deferred messages until stopped, or until no more can be sent."""

import time
from typing import TYPE_CHECKING

import click

from oncely._util.event_log import EventLog
from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened, opened_transport
from oncely.cli.options import LedgerName, Note, Running
from oncely.cli.progress import Progress
from oncely.cli.tables import counts_table, put
from oncely.cli.terminal import put_json, say, tell_audit
from oncely.core.shown import span

if TYPE_CHECKING:
    from oncely.consuming.health import Pulse
    from oncely.ledger import Ledger
    from oncely.outbox import Relay, RelayReport
    from oncely.stores.store import Backlog

_log = EventLog(__name__)

_LOOK_EVERY_S = 1.0


@click.command(
    "relay",
    epilog=options.example("oncely relay --ledger env:LEDGER_URL --transport env:BROKER_URL"),
)
@options.url("--transport", "transport", "sqlite:///queue.db", "ONCELY_TRANSPORT")
@click.option("--drain", is_flag=True, help="end when nothing more can be sent")
@click.option("--batch", type=values.NUMBER, default=100, help="messages taken in one batch")
@click.option(
    "--poll",
    type=values.TIME,
    default="1s",
    help="how often to look for messages, also without a notification",
)
@click.option(
    "--tries", type=values.NUMBER, default=10, help="attempts before a refused message is set aside"
)
@click.option(
    "--retry-set-aside",
    is_flag=True,
    help="retry set-aside messages first; --why and --by are logged with it",
)
@click.option(
    "--create-queues",
    is_flag=True,
    help="create missing queues, instead of setting their messages aside",
)
@options.note
@options.running
@options.ledger
def relay(
    at: LedgerName,
    transport: str | None,
    drain: bool,
    batch: int,
    poll: str,
    tries: int,
    retry_set_aside: bool,
    create_queues: bool,
    note: Note,
    running: Running,
    as_json: bool,
) -> int:
    """Send deferred messages until stopped, or until nothing more can be sent."""
    from oncely.cli.logs import logged
    from oncely.cli.monitoring import observed
    from oncely.outbox import Relay

    with logged(running), opened(at) as ledger, opened_transport(transport) as broker:
        began = time.monotonic()
        if retry_set_aside:
            found = ops.send_every_again(ledger, **note)
            say(f"set-aside messages to retry: {found.freed:,}")
            tell_audit(found.audit_error)
        if running.metrics_port is not None:
            observed(ledger)
        relay = Relay(
            ledger, broker, batch=batch, tries=tries, poll=poll, create_queues=create_queues
        )
        report = _followed(relay, ledger, running, drain=drain)
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
    if as_json:
        put_json(counts)
    else:
        put(counts_table(counts))
    return int(drain and report.error is not None)


def _followed(relay: "Relay", ledger: "Ledger", running: Running, *, drain: bool) -> "RelayReport":
    from oncely._util.signals import StopEvent, end_at_once, on_signals
    from oncely.cli.monitoring import monitored
    from oncely.consuming.health import Pulse

    stop, pulse = StopEvent(), Pulse()
    # The relay asks whether to stop each time it has looked, waited or sent.
    stop.on_asked = pulse.beat
    with (
        on_signals(stop.set, end_at_once),
        monitored(running, ledger, lambda: {"": pulse.health()}),
        Progress(is_quiet=running.log_format == "json") as progress,
    ):
        _log.info("the relay has started", extra={"event": "relay_started"})
        shown = _Shown(ledger, progress, pulse)
        return (relay.drain if drain else relay.run)(stop, shown.show)


class _Shown:
    """Progress, with the number of waiting messages, which the ledger counts now and then."""

    def __init__(self, ledger: "Ledger", progress: Progress, pulse: "Pulse") -> None:
        self._ledger = ledger
        self._progress = progress
        self._pulse = pulse
        self._backlog: Backlog | None = None
        self._look_at = 0.0

    def show(self, report: "RelayReport") -> None:
        """Show the relay's counts."""
        if report.is_away:
            self._pulse.missed(f"{report.error}")
            # The store itself may be unavailable: it is not asked for a count.
            self._progress.show(f"sent {report.sent:,}  cannot go on: {report.error}")
            return
        self._pulse.reached()
        if time.monotonic() >= self._look_at:
            self._backlog = self._ledger.mailbox.backlog()
            self._look_at = time.monotonic() + _LOOK_EVERY_S
        if self._backlog is not None:
            self._progress.show(_line(report, self._backlog))


def _line(report: "RelayReport", backlog: "Backlog") -> str:
    return (
        f"sent {report.sent:,}  refused {report.refused:,}  set aside {report.set_aside:,}  "
        f"waiting {backlog.waiting:,}  lag {span(backlog.lag_s)}"
    )
