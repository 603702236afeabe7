"""Runs the consumer of `oncely consume`, in this process or in several that are supervised."""

import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from oncely._util.event_log import EventLog
from oncely._util.signals import end_at_once, on_signals
from oncely.cli import exit_code
from oncely.cli.consume import ConsumeOptions
from oncely.cli.loading import loaded_consumer
from oncely.cli.logs import logged, write_line
from oncely.cli.monitoring import forget_dead, monitored, observed, shared_metrics
from oncely.cli.terminal import Progress, words
from oncely.consumer.consumer import Consumer
from oncely.consumer.health import Health, Pulse
from oncely.consumer.lifeline import Lifeline
from oncely.consumer.report import ConsumerReport
from oncely.consumer.supervisor import Supervisor
from oncely.core.errors import ConfigError, OncelyError

_log = EventLog(__name__)

_MARGIN_S = 5.0
"""How long a process may take to stop, in addition to the grace time of its handlers."""
_COUNTS = ", ".join(f"{words(each)} %({each})s" for each in ConsumerReport().counts())
"""The counts of a report, in sentences of the log."""
_SENTENCES = {
    "worker_died": "worker %(worker)s %(reason)s; it is started again in %(again_in_s)s s",
    "worker_killed": "worker %(worker)s was killed: %(reason)s; its messages are in doubt when "
    "their leases run out",
}


def run(options: ConsumeOptions) -> ConsumerReport:
    """Run the consumer until it ends, and return what it counted."""
    running, workers = options.running, options.workers
    with logged(running), _loaded(options) as consumer:
        _check_shared(consumer, workers)
        began = time.monotonic()
        names = {"consumer": options.consumer, "queue": consumer.queue}

        def started() -> None:
            _log.info(
                "consumer %(consumer)s of queue '%(queue)s' has started; workers: %(workers)s",
                extra={"event": "consumer_started", **names, "workers": workers},
            )

        with Progress(is_quiet=running.log_format == "json") as progress:
            run_all = _supervise if workers > 1 else _run_here
            report = run_all(options, consumer, progress, Pulse(started))
        took_s = round(time.monotonic() - began, 1)
        _log.info(
            "consumer %(consumer)s of queue '%(queue)s' has stopped after %(took_s)s s: " + _COUNTS,
            extra={"event": "consumer_stopped", **names, **report.counts(), "took_s": took_s},
        )
    return report


def _loaded(options: ConsumeOptions) -> AbstractContextManager[Consumer]:
    return loaded_consumer(options.consumer, options.ledger, options.transport)


def _run_here(
    options: ConsumeOptions, consumer: Consumer, progress: Progress, pulse: Pulse
) -> ConsumerReport:
    with (
        on_signals(consumer.stop, end_at_once),
        monitored(options.running, consumer.ledger, lambda: {"": pulse.health()}),
    ):
        consumer.pulse = pulse
        return consumer.consume(
            drain=options.drain, on_progress=lambda report: progress.show(_line(report))
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


def work(options: ConsumeOptions, lifeline: int, worker: int | None) -> int:
    """Run as one of several workers, and return its exit code: its log and its report go to the
    supervisor.
    """
    line = Lifeline(lifeline)

    def write(text: str) -> None:
        if not line.log(text):
            write_line(text)

    with logged(options.running, write, worker):
        try:
            report = _report_of_work(options, line)
        except OncelyError as error:
            line.fail(str(error))
            return exit_code(error)
        _log.info(
            "a worker has stopped: " + _COUNTS, extra={"event": "worker_stopped", **report.counts()}
        )
    line.end(report)
    return 0


def _report_of_work(options: ConsumeOptions, line: Lifeline) -> ConsumerReport:
    pulse = Pulse(lambda: _log.info("a worker takes messages", extra={"event": "worker_started"}))
    line.show_health(pulse.health)
    # A second signal does not end this process at once, as the first may come twice: from the
    # supervisor, and from whoever stops all processes of a service. It ends the supervisor, which
    # kills this process.
    with _loaded(options) as consumer, on_signals(consumer.stop):
        line.grace_s = _grace_s(consumer)
        if options.running.metrics_port is not None:
            observed(consumer.ledger)
        consumer.pulse = pulse
        return consumer.consume(drain=options.drain, on_progress=line.show)


def _supervise(
    options: ConsumeOptions, consumer: Consumer, progress: Progress, pulse: Pulse
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

    with shared_metrics(options.running) as shared:
        supervisor = Supervisor(
            _command(options),
            options.workers,
            drains=options.drain,
            grace_s=_grace_s(consumer),
            tell=tell,
            on_line=write_line,
            env={**os.environ, **shared},
        )
        with (
            on_signals(stop.set, end),
            monitored(options.running, consumer.ledger, healths, shared),
        ):
            return supervisor.run(stop, show)


def _command(options: ConsumeOptions) -> Sequence[str]:
    """The command line that starts a worker."""
    url, table, schema = options.ledger
    typed = {"ledger": url, "table": table, "schema": schema, "transport": options.transport}
    typed |= options.running._asdict()
    flags = {"--drain": options.drain, "--json": options.as_json}
    return [
        *(sys.executable, "-m", "oncely", "consume", options.consumer),
        *(flag for flag, is_set in flags.items() if is_set),
        *(f"--{n.replace('_', '-')}={v}" for n, v in typed.items() if v is not None),
    ]


def _grace_s(consumer: Consumer) -> float:
    return consumer.grace_s + _MARGIN_S


def _line(report: ConsumerReport) -> str:
    return "  ".join(f"{words(name)} {count:,}" for name, count in report.counts().items())
