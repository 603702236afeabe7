"""A ledger with a day of made-up trouble, workers that go on making it, and the dashboard.

`make demo` runs it until Ctrl-C. Workers are killed by what they handle, and started again.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import oncely
from oncely import ops
from oncely.core.activity import BOUNDS_S, PERIOD_S, Activity, Run, Worker
from oncely.ledger.ledger import Ledger

HERE = Path(__file__).resolve().parent
MOODS = {"good": 90, "flaky": 5, "declined": 3, "gone": 1.5, "crash": 0.5}
WORKERS = ("billing", "billing", "mailing")
_DAY_S = 86_400
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def order(number: int, mood: str | None = None) -> oncely.Message:
    """An order, and what will become of it."""
    [drawn] = random.choices([*MOODS], [*MOODS.values()])
    body = {
        "to": random.choice(["anna", "ben", "chloe", "dmitri"]) + "@example.org",
        "total": random.randint(5, 500),
        "card": f"{random.randint(0, 9999):04}",
        "mood": mood or drawn,
    }
    return oncely.Message(f"order-{number:06}", json.dumps(body).encode(), "order.placed")


def yesterday(ledger: Ledger) -> None:
    """What workers did in the day before: a quiet night, a busy noon, a bad hour."""
    now = ledger.now()
    first = int((now - _DAY_S) // PERIOD_S + 1) * PERIOD_S
    for name in ("billing", "mailing"):
        worker = Worker(uuid4().hex, "consumer", name, "shop-2", 4711, oncely.__version__, 0, 0, 0)
        periods = range(first, int(now) - PERIOD_S, PERIOD_S)
        rows = [_period(name, worker.id, began, now) for began in periods]
        ledger.operations.keep_worker(worker, rows)
        ledger.operations.end_worker(worker.id)
    for hours, failed, quarantined in ((20, 0, {"missing_id": 7, "not_json": 5}), (8, 12, {})):
        totals = {
            "received": 48_000,
            "handled": 47_112 - failed - sum(quarantined.values()),
            "duplicates": {"input": 700, "ledger": 188},
            "quarantined": quarantined,
            "failed": failed,
            "waiting": 0,
            "in_doubt": 0,
            "seconds": 61.2,
        }
        began = now - 3_600 * hours
        ledger.operations.keep_run(
            Run(uuid4().hex, "nightly-invoices", "invoices", began, began + 61, totals)
        )
    card = oncely.Key("billing", "order-000017")
    if isinstance(asked := ledger.claim(card), oncely.Granted):
        ledger.fail(asked.claim, "ValueError: card ending in 4711 was declined", final=True)
    found = ops.select(ledger, ops.Selection(states=["failed"]), limit=1)
    ops.reset(ledger, found.records, by="anna", why="the customer has a new card")


def _period(consumer: str, worker: str, began: int, now: float) -> Activity:
    ago_h = (now - began) / 3_600
    busy = 400 * (1.2 + math.sin(ago_h / 24 * 2 * math.pi)) * random.uniform(0.8, 1.2)
    is_bad = 5 < ago_h < 6
    handled = int(busy * (0.4 if is_bad else 1))
    failed = int(busy * (0.5 if is_bad else 0.02))
    # Logarithms: the provider of cards is slower than the mail server, and in the bad hour both.
    usual_s = {"billing": -1, "mailing": -3}
    seconds = [0] * (len(BOUNDS_S) + 1)
    for _ in range(handled + failed):
        took_s = random.lognormvariate(usual_s[consumer] + 2 * is_bad, 0.8)
        seconds[bisect_left(BOUNDS_S, took_s)] += 1
    return Activity(
        consumer,
        worker,
        began,
        handled=handled,
        failed_attempts=failed,
        failed=failed // 20,
        duplicates=int(busy * 0.03),
        in_doubt=int(random.random() < 0.1),
        seconds=seconds,
    )


def produce(stop: threading.Event, first: int) -> None:
    """Some orders each second, one of them twice: brokers do that."""
    with contextlib.closing(oncely.open_transport(os.environ["TROUBLE_QUEUES"])) as queues:
        number = first
        while not stop.wait(0.25):
            message = order(number)
            queues.publish("orders", [message] * (2 if number % 17 == 0 else 1))
            number += 1


def command(*words: str) -> Sequence[str]:
    """An `oncely` command in this Python."""
    return [sys.executable, "-m", "oncely", *words]


class Processes:
    """Processes that end with this one, and whose end it waits for."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []
        self._starting = threading.Lock()
        self._ending = threading.Event()

    def run(self, words: Sequence[str], errors: int | None = None) -> int:
        """Start one and return its exit code: in a thread, which no signal interrupts."""
        with self._starting:
            # None is started that `end` does not see.
            if self._ending.is_set():
                return 0
            process = subprocess.Popen(words, cwd=HERE, stderr=errors)
            self._running.append(process)
        code = process.wait()
        self._running.remove(process)
        return code

    def keep(self, words: Sequence[str]) -> None:
        """Start it again whenever it dies, as systemd or Kubernetes does."""
        while not self._ending.is_set():
            self.run(words, errors=subprocess.DEVNULL)
            self._ending.wait(2)

    def end(self) -> None:
        """End all, and start none any more."""
        with self._starting:
            self._ending.set()
        for process in [*self._running]:
            process.terminate()


def end_in_good_order() -> None:
    """Let signals that end this process end its workers first: they would outlive it."""

    def end(*_: object) -> None:
        for number in _ENDING:
            # The next one does not disturb what the first has begun.
            signal.signal(number, lambda *_: None)
        raise KeyboardInterrupt

    for number in _ENDING:
        signal.signal(number, end)


def served(web: Sequence[str], others: Sequence[Sequence[str]]) -> int:
    """Serve the dashboard until it ends or this process is to end, and keep the others running."""
    processes = Processes()
    with ThreadPoolExecutor(1 + len(others)) as threads:
        try:
            for words in others:
                threads.submit(processes.keep, words)
            return threads.submit(processes.run, web).result()
        finally:
            processes.end()


def main() -> int:
    """Make the trouble, then serve the dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", default="8470")
    parser.add_argument("--folder", help="where the ledger is kept; a new one by default")
    parsed = parser.parse_args()
    folder = Path(parsed.folder or tempfile.mkdtemp(prefix="oncely-demo-")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TROUBLE_LEDGER"] = os.environ["ONCELY_LEDGER"] = f"sqlite:///{folder / 'ledger.db'}"
    os.environ["TROUBLE_QUEUES"] = f"sqlite:///{folder / 'queues.db'}"
    with contextlib.closing(oncely.open_ledger(os.environ["ONCELY_LEDGER"])) as ledger:
        ledger.migrate()
        if not ledger.operations.runs(1):
            yesterday(ledger)
    with contextlib.closing(oncely.open_transport(os.environ["TROUBLE_QUEUES"])) as queues:
        # Faster than orders are made: a second run on the same folder has other ids.
        first = int(time.time() * 10) % 1_000_000
        bad = ("declined", "gone", "flaky", *["good"] * 12)
        orders = [order(first + n, bad[n % len(bad)]) for n in range(90)]
        queues.publish("orders", [*orders, order(first + 90, "crash")])
    stop = threading.Event()
    producing = threading.Thread(target=produce, args=(stop, first + 91))
    workers = [command("consume", f"shop:{name}") for name in WORKERS]
    relay = command("relay", "--transport", os.environ["TROUBLE_QUEUES"])
    web = command("web", "--port", parsed.port)
    try:
        end_in_good_order()
        producing.start()
        return served(web, [*workers, relay])
    except KeyboardInterrupt:
        return 0
    finally:
        stop.set()
        if producing.ident is not None:
            producing.join()


if __name__ == "__main__":
    sys.exit(main())
