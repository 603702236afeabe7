"""Processes that write batches, and are killed: `killed.py KIND FOLDER [BATCHES KILLS]`. They are
forks of this one, which has no threads of deltalake's.
"""

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import event
from tests.conditions import wait_until
from tests.lake.tables import KEYS, Orders, rows
from tests.processes import exit_of, forked

import oncely
from oncely import lake

POINTS = ("before", "in", "after")
ROWS = 3  # Of a batch. The id of each is the batch's number.


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(orders: Orders, point: str) -> None:
    """Have this process killed before its commit, in it (files are written), or after it."""
    kind = KEYS[orders.kind]
    commit = kind.commit
    if point == "before":
        kind.commit = kill
    elif point == "after":
        kind.commit = lambda *args: kill(commit(*args))
    elif orders.kind == "iceberg":
        event.listen(orders.catalog.engine, "commit", kill)
    else:
        log = Path(orders.path, "_delta_log")
        before = {*log.iterdir()}
        wait = partial(wait_until, lambda: {*log.iterdir()} != before, pause_s=0)
        threading.Thread(target=lambda: kill(wait())).start()


def handle(kind: str, folder: Path, number: int, point: str | None = None) -> None:
    """Have a batch handled, as a worker does: once, and where that is in doubt, ask the table."""
    orders = Orders(kind, folder)
    ledger = oncely.open_ledger(f"sqlite:///{folder}/ledger.db")
    probed = oncely.effectively_once(on_in_doubt=lambda it: lake.probe(orders.load(), it.id))

    @oncely.once(ledger, consumer="orders", key=str, lease="2s", policy=probed)
    def write(key: int) -> None:
        # Nobody is called for a batch that has landed.
        assert orders.write(rows(*[key] * ROWS), str(key))

    def is_done() -> bool:
        with suppress(oncely.BusyError):
            write(number)
            return True
        return False

    if point:
        arm(orders, point)
    wait_until(is_done, pause_s=0.2)


def at_points(kind: str, folder: Path) -> None:
    """Kill a worker at each point, all at once; then let another one handle each batch."""
    works = [partial(handle, kind, folder, number) for number in range(len(POINTS))]
    killed = [forked(partial(work, at)) for work, at in zip(works, POINTS, strict=True)]
    assert [exit_of(each) for each in killed] == [-signal.SIGKILL] * len(POINTS)
    assert [exit_of(each) for each in map(forked, works)] == [0] * len(POINTS)


def write_all(kind: str, folder: Path, log: Path, batches: int) -> None:
    """Write what this writer has not written yet, asking first for the one in which it died."""
    orders, began_at = Orders(kind, folder), len(log.read_text().split())
    for number in range(began_at, batches):
        key = f"batch/{number}"
        happened = number == began_at and lake.probe(orders.load(), key) == "happened"
        told = "found" if happened else orders.write(rows(*[number] * ROWS), key)
        with log.open("a") as file:
            file.write(f"{told}\n")


def at_random(kind: str, folder: Path, batches: int, kills: int) -> None:
    """Two writers try each batch. Kill one after the other, somewhere; another takes its place."""
    logs = [folder / "writer0", folder / "writer1"]
    for log in logs:
        log.touch()
    works = [partial(write_all, kind, folder, log, batches) for log in logs]
    writers = [*map(forked, works)]
    for due in range(0, kills * 3, 3):
        wait_until(lambda: any(len(log.read_text().split()) >= due for log in logs))  # noqa: B023
        time.sleep(random.uniform(0, 0.2))
        victim = random.randrange(2)
        os.kill(writers[victim], signal.SIGKILL)
        # It may have had nothing left to do.
        assert exit_of(writers[victim]) in (-signal.SIGKILL, 0)
        writers[victim] = forked(works[victim])
    assert [exit_of(each) for each in writers] == [0, 0]


if __name__ == "__main__":
    kill_some: Any = at_random if len(sys.argv) > 3 else at_points
    kill_some(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
