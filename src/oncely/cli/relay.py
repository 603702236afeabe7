"""`oncely relay`: sends deferred messages until stopped, or until no more can be sent."""

import time
from typing import TYPE_CHECKING, Any

from oncely._util.event_log import EventLog
from oncely.cli import lazy_ops as ops
from oncely.cli import options, values
from oncely.cli.opening import opened, opened_transport
from oncely.cli.options import LedgerName, Note, Running
from oncely.cli.tables import put_counts
from oncely.cli.terminal import Progress, say, tell_audit
from oncely.core.shown import span

if TYPE_CHECKING:
    from oncely.ledger.ledger import Ledger
    from oncely.outbox import Relay, RelayReport

_log = EventLog(__name__)

_LOOK_EVERY_S = 1.0


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
    running: Running,
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
            found = ops.send_every_again(ledger, **note)
            say(f"set-aside messages to retry: {found.changed:,}")
            tell_audit(found.audit_error)
        if running.metrics_port is not None:
            observed(ledger)
        report = _followed(Relay(ledger, broker, **settings), ledger, running, drain=drain)
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
    put_counts(counts, as_json=as_json)
    return int(drain and report.error is not None)


def _followed(relay: "Relay", ledger: "Ledger", running: Running, *, drain: bool) -> "RelayReport":
    from oncely._util.signals import StopEvent, end_at_once, on_signals
    from oncely.cli.monitoring import monitored
    from oncely.consumer.health import Pulse
    from oncely.stores.store import Backlog

    stop, pulse = StopEvent(), Pulse()
    # The relay asks whether to stop each time it has looked, waited or sent.
    stop.on_asked = pulse.beat
    with (
        on_signals(stop.set, end_at_once),
        monitored(running, ledger, lambda: {"": pulse.health()}),
        Progress(is_quiet=running.log_format == "json") as progress,
    ):
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
