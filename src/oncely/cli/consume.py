"""`oncely consume`: runs a consumer, in this process or in several that are supervised."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict

from oncely._util.signals import told_to_stop
from oncely.cli.ledger_arguments import opened, opened_transport
from oncely.cli.loading import load_consumer
from oncely.cli.progress import Progress
from oncely.cli.tables import counts_table, put, words
from oncely.consumer import Consumer
from oncely.consuming.consumer_report import ConsumerReport
from oncely.consuming.lifeline import Lifeline
from oncely.consuming.supervising import Supervisor
from oncely.core.errors import ConfigError, OncelyError, mask_passwords
from oncely.core.shown import shown

_MARGIN_S = 5.0
"""What a process may take to stop, besides the grace time of what runs in it."""


def consume(parsed: argparse.Namespace) -> int:
    """Run the consumer; return 1 where a message failed or was dead-lettered."""
    # What handlers print goes to stderr, where stdout is for the one JSON object.
    with redirect_stdout(sys.stderr) if parsed.json else nullcontext():
        if parsed.lifeline is not None:
            return _work(parsed)
        with _loaded(parsed) as consumer:
            _check_shared(consumer, parsed.workers)
            report = _followed(parsed, consumer)
    if parsed.json:
        print(json.dumps(asdict(report)))
    else:
        put(counts_table(asdict(report)))
    return int(bool(report.failed or report.dead_lettered))


def _followed(parsed: argparse.Namespace, consumer: Consumer) -> ConsumerReport:
    """Run it, and show where it stands."""
    with Progress() as progress:
        if parsed.workers > 1:
            return _supervise(parsed, consumer, progress)
        return consumer.consume(
            drain=parsed.drain,
            stop_on_signals=True,
            on_progress=lambda report: progress.show(_line(report)),
        )


@contextmanager
def _loaded(parsed: argparse.Namespace) -> Iterator[Consumer]:
    """The consumer, with the ledger and the transport that were typed, else its own."""
    consumer = load_consumer(parsed.consumer)
    with ExitStack() as stack:
        if parsed.ledger is not None:
            consumer.redirect(ledger=stack.enter_context(opened(parsed)))
        if parsed.transport is not None:
            consumer.redirect(transport=stack.enter_context(opened_transport(parsed)))
        yield consumer


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
    print(
        'note: "memory://" is seen by this process only: nobody else can publish to it',
        file=sys.stderr,
    )


def _work(parsed: argparse.Namespace) -> int:
    """As one of several workers: what there is to say goes to the supervisor."""
    line = Lifeline(parsed.lifeline)
    try:
        with _loaded(parsed) as consumer:
            line.grace_s = _grace_s(consumer)
            report = consumer.consume(
                drain=parsed.drain, stop_on_signals=True, on_progress=line.show
            )
    except OncelyError as error:
        line.fail(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    line.end(report)
    return 0


def _supervise(
    parsed: argparse.Namespace, consumer: Consumer, progress: Progress
) -> ConsumerReport:
    command = [sys.executable, "-m", "oncely", "consume", parsed.consumer]
    command += [f"--{name}" for name in ("drain", "json") if getattr(parsed, name)]
    typed = {name: getattr(parsed, name) for name in ("ledger", "transport")}
    command += [f"--{name}={value}" for name, value in typed.items() if value is not None]
    supervisor = Supervisor(
        command,
        parsed.workers,
        drains=parsed.drain,
        grace_s=_grace_s(consumer),
        tell=lambda line: print(mask_passwords(shown(line)), file=sys.stderr, flush=True),
    )
    with told_to_stop() as stop:
        return supervisor.run(stop, lambda report: progress.show(_line(report)))


def _grace_s(consumer: Consumer) -> float:
    return consumer.grace_s + _MARGIN_S


def _line(report: ConsumerReport) -> str:
    return "  ".join(f"{words(name)} {count:,}" for name, count in asdict(report).items())
