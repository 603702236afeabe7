"""`oncely consume`: runs a consumer, in this process or in several that are supervised."""

import argparse
import json
import os
import sys
import threading
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, fields
from typing import Any

from oncely._util.event_log import EventLog
from oncely._util.signals import end_at_once, on_signals
from oncely.cli.loading import loaded_consumer
from oncely.cli.logs import logged, write_line
from oncely.cli.monitoring import forget_dead, monitored, observed, shared_metrics
from oncely.cli.progress import Progress
from oncely.cli.tables import counts_table, put, words
from oncely.consumer import Consumer
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.health import Health, Pulse
from oncely.consuming.lifeline import Lifeline
from oncely.consuming.supervising import Supervisor
from oncely.core.errors import ConfigError, OncelyError

_log = EventLog(__name__)

_MARGIN_S = 5.0
"""How long a process may take to stop, in addition to the grace time of its handlers."""
_PASSED_ON = ("ledger", "table", "schema", "transport", "log_level", "log_format", "metrics_port")
"""The options of the command line that are handed to the workers."""
_COUNTS = ", ".join(f"{words(each.name)} %({each.name})s" for each in fields(ConsumerReport))
"""The counts of a report, in sentences of the log."""
_WORKER_STOPPED = f"a worker has stopped: {_COUNTS}"
_CONSUMER_STOPPED = (
    f"consumer %(consumer)s of queue '%(queue)s' has stopped after %(took_s)s s: {_COUNTS}"
)
_SENTENCES = {
    "worker_died": "worker %(worker)s %(reason)s; it is started again in %(again_in_s)s s",
    "worker_killed": "worker %(worker)s was killed: %(reason)s; its messages are in doubt when "
    "their leases run out",
}


def consume(parsed: argparse.Namespace) -> int:
    """Run the consumer; return 1 if, with --drain, a message failed or was dead-lettered.

    Without --drain the user stops it, and that is success: the failures are in the report.
    """
    # Handlers' own output goes to stderr: stdout is for the one JSON object.
    with redirect_stdout(sys.stderr) if parsed.json else nullcontext():
        if parsed.lifeline is not None:
            return _work(parsed)
        with logged(parsed), loaded_consumer(parsed) as consumer:
            _check_shared(consumer, parsed.workers)
            report = _followed(parsed, consumer)
    if parsed.json:
        print(json.dumps(asdict(report)))
    else:
        put(counts_table(asdict(report)))
    return int(parsed.drain and bool(report.failed or report.dead_lettered))


def _followed(parsed: argparse.Namespace, consumer: Consumer) -> ConsumerReport:
    began = time.monotonic()
    names = {"consumer": parsed.consumer, "queue": consumer.queue}
    pulse = Pulse(
        lambda: _log.info(
            "consumer %(consumer)s of queue '%(queue)s' has started; workers: %(workers)s",
            extra={"event": "consumer_started", **names, "workers": parsed.workers},
        )
    )
    with Progress(is_quiet=parsed.log_format == "json") as progress:
        run = _supervise if parsed.workers > 1 else _run
        report = run(parsed, consumer, progress, pulse)
    took_s = round(time.monotonic() - began, 1)
    _log.info(
        _CONSUMER_STOPPED,
        extra={"event": "consumer_stopped", **names, **asdict(report), "took_s": took_s},
    )
    return report


def _run(
    parsed: argparse.Namespace, consumer: Consumer, progress: Progress, pulse: Pulse
) -> ConsumerReport:
    with (
        on_signals(consumer.stop, end_at_once),
        monitored(parsed, consumer.ledger, lambda: {"": pulse.health()}),
    ):
        consumer.pulse = pulse
        return consumer.consume(
            drain=parsed.drain, on_progress=lambda report: progress.show(_line(report))
        )


def _check_shared(consumer: Consumer, workers: int) -> None:
    if workers > 1 and consumer.ledger is not None and not consumer.ledger.is_shared:
        raise ConfigError(
            'ledger: "memory://" is seen by one process only; for --workers write '
            '"sqlite:///ledger.db"'
        )
    if consumer.url is None or not consumer.url.startswith("memory:"):
        return
    if workers > 1:
        raise ConfigError(
            '"memory://" is seen by one process only; for --workers write "sqlite:///queue.db"'
        )
    _log.warning(
        "the queue is in memory: %(note)s",
        extra={"event": "queue_in_memory", "note": "no other process can publish to it"},
    )


# ---- Several processes -------------------------------------------------------------------------


def _work(parsed: argparse.Namespace) -> int:
    """Run as one of several workers: its log and its report go to the supervisor."""
    line = Lifeline(parsed.lifeline)

    def write(text: str) -> None:
        if not line.log(text):
            write_line(text)

    with logged(parsed, write):
        try:
            report = _report_of_work(parsed, line)
        except OncelyError as error:
            line.fail(str(error))
            return 2 if isinstance(error, ConfigError) else 1
        _log.info(_WORKER_STOPPED, extra={"event": "worker_stopped", **asdict(report)})
    line.end(report)
    return 0


def _report_of_work(parsed: argparse.Namespace, line: Lifeline) -> ConsumerReport:
    pulse = Pulse(lambda: _log.info("a worker takes messages", extra={"event": "worker_started"}))
    line.show_health(pulse.health)
    # A second signal does not end this process at once, as the first may come twice: from the
    # supervisor, and from whoever stops all processes of a service. It ends the supervisor, which
    # kills this process.
    with loaded_consumer(parsed) as consumer, on_signals(consumer.stop):
        line.grace_s = _grace_s(consumer)
        if parsed.metrics_port is not None:
            observed(consumer.ledger)
        consumer.pulse = pulse
        return consumer.consume(drain=parsed.drain, on_progress=line.show)


def _supervise(
    parsed: argparse.Namespace, consumer: Consumer, progress: Progress, pulse: Pulse
) -> ConsumerReport:
    stop = threading.Event()
    pulse.reached()

    def show(report: ConsumerReport) -> None:
        pulse.beat()
        progress.show(_line(report))

    def healths() -> dict[str, Health]:
        return {"supervisor": pulse.health(), **supervisor.health}

    def end(number: int) -> None:
        supervisor.kill()
        end_at_once(number)

    def tell(event: str, /, *, worker: int, **details: Any) -> None:
        _log.warning(_SENTENCES[event], extra={"event": event, "worker": worker, **details})
        if event == "worker_died":
            forget_dead(shared, details["pid"])

    with shared_metrics(parsed) as shared:
        supervisor = Supervisor(
            _command(parsed),
            parsed.workers,
            drains=parsed.drain,
            grace_s=_grace_s(consumer),
            tell=tell,
            on_line=write_line,
            env={**os.environ, **shared},
        )
        with (
            on_signals(stop.set, end),
            monitored(parsed, consumer.ledger, healths, shared),
        ):
            return supervisor.run(stop, show)


def _command(parsed: argparse.Namespace) -> list[str]:
    """The command line that starts a worker."""
    command = [sys.executable, "-m", "oncely", "consume", parsed.consumer]
    command += [f"--{name}" for name in ("drain", "json") if getattr(parsed, name)]
    typed = {name.replace("_", "-"): getattr(parsed, name) for name in _PASSED_ON}
    return command + [f"--{name}={value}" for name, value in typed.items() if value is not None]


def _grace_s(consumer: Consumer) -> float:
    return consumer.grace_s + _MARGIN_S


def _line(report: ConsumerReport) -> str:
    return "  ".join(f"{words(name)} {count:,}" for name, count in asdict(report).items())
