"""What is killed: a process with a consumer for each mode, which works until its input ends."""

import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from sqlalchemy import Connection, create_engine, text
from tests.chaos.check import (
    HELD,
    MODES,
    ORDERED,
    OUT,
    REPEATED,
    TRANSACTIONAL,
    fails,
    fails_permanently,
    sends,
)

from oncely.consumer import Consumer
from oncely.consumer.report import ConsumerReport
from oncely.core.control import Unrecoverable
from oncely.core.errors import StoreUnavailable, TransportError
from oncely.core.message import Message, current
from oncely.core.policy import Policy, at_least_once, at_most_once
from oncely.ledger.ledger import open_ledger

LEASE_S = 2.0
_POLICIES: Mapping[str, Policy] = {
    # No try is spent when a server goes away: no more are needed than usual.
    TRANSACTIONAL: at_least_once(lease=f"{LEASE_S}s", backoff="200ms"),
    HELD: at_most_once(lease=f"{LEASE_S}s"),
    # The kills may hit one message many times.
    REPEATED: at_least_once(lease=f"{LEASE_S}s", backoff="200ms", tries=1_000),
    ORDERED: at_least_once(lease=f"{LEASE_S}s", backoff="200ms", tries=1_000),
}
_CONCURRENCY = 2
_LONGEST_S = 0.02
"""What a handler takes, before and after its effect."""
_STOP_S = 60.0
_EFFECT = text("INSERT INTO effects (message_id, fence, pid) VALUES (:id, :fence, :pid)")


class Task(NamedTuple):
    """What a worker is told."""

    queue_url: str
    ledger_url: str
    folder: str
    place: str = "0"
    """Which of the workers it is; the first is the one that keeps the order."""
    drain: str = ""
    """Not empty: it ends when its queues are drained."""


def _append(mode: str, log: Path, message: Message) -> None:
    """An effect outside the database, which lasts once this has returned; and what is sent."""
    _take_time()
    _fail_where_due(message)
    _send_where_due(mode, message)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{message.id} {current().claim.fence} {os.getpid()}\n".encode())
    os.fsync(file)
    os.close(file)
    _take_time()


def _insert(message: Message, connection: Connection) -> None:
    """An effect in the ledger's own database, and what is sent; where it fails, nothing of both."""
    _take_time()
    fence = current().claim.fence
    connection.execute(_EFFECT, {"id": message.id, "fence": fence, "pid": os.getpid()})
    _send_where_due(TRANSACTIONAL, message)
    _take_time()
    _fail_where_due(message)


def _fail_where_due(message: Message) -> None:
    if fails_permanently(message.id):
        raise Unrecoverable("this can never work")
    if fails(message.id) and current().claim.attempts == 1:
        raise ValueError("not yet")


def _send_where_due(mode: str, message: Message) -> None:
    if sends(message.id):
        message.send(OUT, f"{mode} {message.id}")


def _take_time() -> None:
    time.sleep(random.uniform(0, _LONGEST_S))


class _Consuming:
    """One consumer at work in a thread of its own."""

    def __init__(self, consumer: Consumer, handler: Callable[..., Any], *, drain: bool) -> None:
        self.stop = consumer.stop
        self._consume = partial(
            consumer.consume, handler, drain=drain, on_progress=self._note_progress
        )
        self._has_worked = False
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def _note_progress(self, _: ConsumerReport) -> None:
        self._has_worked = True

    def _run(self) -> None:
        try:
            self._begin()
        except BaseException:  # noqa: BLE001 - whatever it is, the whole worker is to end.
            traceback.print_exc()
            os._exit(1)

    def _begin(self) -> None:
        while True:
            try:
                self._consume()
                return
            except (TransportError, StoreUnavailable):
                # A server may be away as it begins; once it is at work it has to wait by itself.
                if self._has_worked:
                    raise
                traceback.print_exc()
                time.sleep(0.1)


def _consumer(mode: str, task: Task, ledger: Any) -> _Consuming:
    consumer = (
        Consumer(task.queue_url, mode)
        .idempotent(ledger, mode, policy=_POLICIES[mode])
        .concurrency(_CONCURRENCY)
    )
    drain = bool(task.drain)
    if mode == TRANSACTIONAL:
        url = task.ledger_url.replace("postgresql://", "postgresql+psycopg://")
        return _Consuming(consumer.transactional(create_engine(url)), _insert, drain=drain)
    is_ordered = mode == ORDERED
    # In one file, one after another: the order is to be seen.
    log = Path(task.folder) / f"{mode}-{'all' if is_ordered else os.getpid()}.log"
    if is_ordered:
        consumer.ordered()
    return _Consuming(consumer, partial(_append, mode, log), drain=drain)


def main(task: Task) -> None:
    """Consume until the input ends, or until all is drained."""
    ledger = open_ledger(task.ledger_url)
    modes = [mode for mode in MODES if mode != ORDERED or task.place == "0"]
    consumers = [_consumer(mode, task, ledger) for mode in modes]

    def stop_at_the_end() -> None:
        sys.stdin.read()
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until:
            for consumer in consumers:
                # Told again, since one that is only about to consume forgets it.
                consumer.stop()
                consumer.thread.join(0.1)
        sys.stderr.write("a consumer does not stop\n")
        os._exit(1)

    Thread(target=stop_at_the_end, daemon=True).start()
    for consumer in consumers:
        consumer.thread.join()


if __name__ == "__main__":
    main(Task(*sys.argv[1:]))
