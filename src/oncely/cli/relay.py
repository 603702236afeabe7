"""`oncely relay`: sends deferred messages until stopped, or until no more can be sent."""

import argparse
import json
import sys
import time

from oncely import ops
from oncely._util.event_log import EventLog
from oncely._util.signals import StopEvent, end_at_once, on_signals
from oncely.cli.changes import login_name, tell_audit
from oncely.cli.ledger_arguments import opened, opened_transport
from oncely.cli.logs import logged
from oncely.cli.monitoring import monitored, observed
from oncely.cli.progress import Progress
from oncely.cli.tables import counts_table, put
from oncely.consuming.health import Pulse
from oncely.core.shown import span
from oncely.ledger import Ledger
from oncely.outbox import Relay, RelayReport
from oncely.stores.store import Backlog
from oncely.transports.transport import Transport

_log = EventLog(__name__)

_LOOK_EVERY_S = 1.0


def relay(parsed: argparse.Namespace) -> int:
    """Send deferred messages; return 1 if, with --drain, one could not be sent."""
    with logged(parsed), opened(parsed) as ledger, opened_transport(parsed) as transport:
        began = time.monotonic()
        if parsed.retry_set_aside:
            found = ops.send_every_again(ledger, by=parsed.by or login_name(), why=parsed.why)
            print(f"set-aside messages to retry: {found.freed:,}", file=sys.stderr)
            tell_audit(found.audit_error)
        report = _followed(parsed, ledger, transport)
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
    if parsed.json:
        print(json.dumps(counts))
    else:
        put(counts_table(counts))
    return int(parsed.drain and report.error is not None)


def _followed(parsed: argparse.Namespace, ledger: Ledger, transport: Transport) -> RelayReport:
    if parsed.metrics_port is not None:
        observed(ledger)
    relay = Relay(
        ledger,
        transport,
        batch=parsed.batch,
        tries=parsed.tries,
        poll=parsed.poll,
        create_queues=parsed.create_queues,
    )
    stop, pulse = StopEvent(), Pulse()
    # The relay asks whether to stop each time it has looked, waited or sent.
    stop.on_asked = pulse.beat
    with (
        on_signals(stop.set, end_at_once),
        monitored(parsed, ledger, lambda: {"": pulse.health()}),
        Progress(is_quiet=parsed.log_format == "json") as progress,
    ):
        _log.info("the relay has started", extra={"event": "relay_started"})
        shown = _Shown(ledger, progress, pulse)
        return (relay.drain if parsed.drain else relay.run)(stop, shown.show)


class _Shown:
    """Progress, with the number of waiting messages, which the ledger counts now and then."""

    def __init__(self, ledger: Ledger, progress: Progress, pulse: Pulse) -> None:
        self._ledger = ledger
        self._progress = progress
        self._pulse = pulse
        self._backlog: Backlog | None = None
        self._look_at = 0.0

    def show(self, report: RelayReport) -> None:
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


def _line(report: RelayReport, backlog: Backlog) -> str:
    return (
        f"sent {report.sent:,}  refused {report.refused:,}  set aside {report.set_aside:,}  "
        f"waiting {backlog.waiting:,}  lag {span(backlog.lag_s)}"
    )
