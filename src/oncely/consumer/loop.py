"""A consumer at work: its window goes on, round by round, until it is stopped or drained."""

import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any

from oncely.consumer.executor import Executor, LoopExecutor, ThreadExecutor
from oncely.consumer.health import BrokerOutage, Pulse
from oncely.consumer.order import Order
from oncely.consumer.report import ConsumerReport
from oncely.consumer.runner import AsyncRunner, Runner, TogetherRunner
from oncely.consumer.sender import Sender
from oncely.consumer.settings import ConsumerSettings
from oncely.consumer.sink import DeliverySink
from oncely.consumer.source import DeliverySource, DueRetries
from oncely.consumer.turn import DeliveryTurn
from oncely.consumer.window import Window
from oncely.lifecycle.heartbeat import store_outage
from oncely.middleware.chain import Stoppable
from oncely.outbox import Relay
from oncely.transports.transport import Transport

_VISIBILITY = timedelta(seconds=10)
"""After a failure to send, the consumer sends its deferred messages again after this time."""
_ENDLESS_HOLD_S = 300.0
"""For how long no other worker is given the messages taken, if claims have no lease."""


def run(
    settings: ConsumerSettings,
    transport: Transport,
    stop: threading.Event,
    on_progress: Callable[[ConsumerReport], None],
    pulse: Pulse,
    *,
    drains: bool,
) -> ConsumerReport:
    """Consume over a transport that has subscribed, until `stop` is set or, where it `drains`,
    nothing is waiting, delayed or in flight. `pulse` records whether the broker can be reached.
    """
    report, outage = ConsumerReport(), store_outage(queue=settings.queue)
    retries = sender = None
    if settings.lifecycle is not None:
        own = replace(settings.lifecycle, stop=stop, grace_s=settings.grace_s, outage=outage)
        settings = replace(settings, lifecycle=own)
        ledger = own.ledger
        ledger.check_privileges("worker")
        if own.retry_queue is not None:
            hold_s = own.lease_s or _ENDLESS_HOLD_S
            retries = DueRetries(ledger.mailbox, own.retry_queue, hold_s, outage)
            relay = Relay(ledger, transport, visibility=_VISIBILITY)
            sender = Sender(relay, ledger.mailbox, own.retry_queue)

    def concluded() -> None:
        if sender is not None:
            report.deferred_sent = sender.sent
        on_progress(report)

    broker, executor = BrokerOutage(settings.queue, pulse), _executor(settings)
    window = Window(
        DeliverySource(settings, transport, retries, report, broker, stop, drains),
        DeliverySink(settings, transport, retries, report, stop),
        Order(is_ordered=settings.is_ordered, retries=retries),
        executor,
        settings.lifecycle,
        settings.policy,
        stop,
        joins=settings.begins is not None,
        runs_all=bool(settings.outer),
        # In a transaction a message that is delivered again may have killed a worker; without a
        # ledger each delivery is an attempt.
        gives_back=settings.lifecycle is not None
        and settings.begins is None
        and not settings.is_ordered,
        sender=sender,
        on_concluded=concluded,
    )
    with closing(transport), closing(window):
        while not stop.is_set():
            has_moved = window.go_on()
            if drains and not has_moved and window.is_drained():
                break
        executor.stop()
        middlewares: Iterable[Any] = (*settings.outer, *settings.inner)
        for middleware in middlewares:
            if isinstance(middleware, Stoppable):
                middleware.stop()
        window.finish(settings.grace_s)
    if sender is not None:
        report.deferred_sent = sender.sent
    return report


def _executor(settings: ConsumerSettings) -> Executor[DeliveryTurn]:
    count, most = settings.concurrency, settings.window
    if settings.are_async:
        return LoopExecutor(AsyncRunner(settings).run, count, most)
    runner = TogetherRunner(settings) if settings.is_together else Runner(settings)
    joins = settings.begins is not None and settings.lifecycle is not None
    return ThreadExecutor(runner.run, count, most, runner.run_together if joins else None)
