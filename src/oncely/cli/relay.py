"""`oncely relay`: sends deferred messages until it is stopped, or nothing more can be sent."""

import argparse
import json
import sys
import time

from oncely._util.signals import told_to_stop
from oncely.cli.ledger_arguments import opened, opened_transport
from oncely.cli.progress import Progress
from oncely.cli.tables import counts_table, put
from oncely.cli.terminal import span
from oncely.ledger import Ledger
from oncely.outbox import Relay, RelayReport
from oncely.stores.store import Backlog

_LOOK_EVERY_S = 1.0


def relay(parsed: argparse.Namespace) -> int:
    """Send what waits; return 1 where a message was refused or set aside."""
    with opened(parsed) as ledger, opened_transport(parsed) as transport:
        relay = Relay(ledger, transport, batch=parsed.batch, tries=parsed.tries, poll=parsed.poll)
        if parsed.send_again:
            print(f"to be sent again: {ledger.mailbox.send_again():,}", file=sys.stderr)
        with told_to_stop() as stop, Progress() as progress:
            follow = relay.drain if parsed.drain else relay.run
            report = follow(stop, _Shown(ledger, progress).show)
        waiting = ledger.mailbox.backlog().waiting
    counts = {
        "sent": report.sent,
        "refused": report.refused,
        "set_aside": report.set_aside,
        "waiting": waiting,
    }
    if parsed.json:
        print(json.dumps(counts))
    else:
        put(counts_table(counts))
    return int(bool(report.refused or report.set_aside))


class _Shown:
    """Progress, with what waits in the ledger, which is asked for now and then."""

    def __init__(self, ledger: Ledger, progress: Progress) -> None:
        self._ledger = ledger
        self._progress = progress
        self._backlog: Backlog | None = None
        self._look_at = 0.0

    def show(self, report: RelayReport) -> None:
        """Show where the relay stands."""
        if report.error is not None:
            # The store may be what is away.
            self._progress.show(f"sent {report.sent:,}  cannot go on: {report.error}")
            return
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
