"""Processes that write batches, and are killed: `killed.py KIND FOLDER BATCHES KILLS`.

All are forks of this one, which has imported what they use, and has no threads of deltalake's. Two
writers try each batch; what is killed is started again. Prints how many batches each has committed.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import event
from tests.conditions import wait_until
from tests.lake.tables import KEYS, Orders, rows
from tests.processes import exit_of, forked

import oncely
from oncely import lake
from oncely._util.crash_points import kill_at

POINTS = ("before", "in", "after", "before_completed")
ROWS = 3
_LEASE = "2s"


def batch(number: int) -> Any:
    """Its rows: each id tells the batch."""
    return rows(*[number] * ROWS)


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(orders: Orders, point: str) -> Any:
    """Have this process killed before its commit, in it, after it, or at a point of oncely's."""
    kind: Any = KEYS[orders.kind]
    commit = kind.commit

    def committed(*args: Any) -> None:
        commit(*args)
        kill()

    if point == "before":
        return patch.object(kind, "commit", kill).start()
    if point == "after":
        return patch.object(kind, "commit", committed).start()
    if point == "before_completed":
        return kill_at(point)
    if orders.kind == "iceberg":
        # The metadata is written, and the catalog has not committed it.
        return event.listen(orders.catalog.engine, "commit", kill)
    log = Path(orders.load(), "_delta_log")

    def watch(before: set[Path]) -> None:
        # As soon as anything of the commit is in the log.
        while {*log.iterdir()} == before:
            pass
        kill()

    return threading.Thread(target=watch, args=({*log.iterdir()},), daemon=True).start()


def handle(kind: str, folder: Path, number: int, point: str | None = None) -> None:
    """Have a batch handled, as a worker does: once, and where that is in doubt, ask the table."""
    orders = Orders(kind, folder)
    ledger = oncely.open_ledger(f"sqlite:///{folder}/ledger.db")
    probed = oncely.effectively_once(on_in_doubt=lambda it: lake.probe(orders.load(), it.id))

    @oncely.once(ledger, consumer="orders", key=str, lease=_LEASE, policy=probed)
    def write(key: int) -> None:
        with (folder / "calls").open("a") as calls:
            calls.write(f"{key}\n")
        orders.write(batch(key), str(key))

    if point:
        arm(orders, point)
        write(number)
        return

    def is_done() -> bool:
        try:
            write(number)
        except (oncely.BusyError, oncely.InDoubtError):
            return False
        return True

    wait_until(is_done, pause_s=0.2)


def write_all(kind: str, folder: Path, writer: int, batches: int) -> None:
    """Write what this writer has not written yet, asking first for the one in which it died."""
    orders, done = Orders(kind, folder), folder / f"writer{writer}"
    log = done.read_text().splitlines() if done.exists() else []
    for number in range(len(log), batches):
        key = f"batch/{number}"
        happened = number == len(log) and lake.probe(orders.load(), key) == "happened"
        told = "found" if happened else orders.write(batch(number), key)
        with done.open("a") as file:
            file.write(f"{told}\n")


def at_points(kind: str, folder: Path) -> None:
    """Kill a worker at each point, all at once; then let another one handle each batch."""
    numbers = range(len(POINTS))
    killed = [forked(lambda: handle(kind, folder, n, POINTS[n])) for n in numbers]  # noqa: B023
    assert [exit_of(each) for each in killed] == [-signal.SIGKILL] * len(POINTS)
    again = [forked(lambda: handle(kind, folder, n)) for n in numbers]  # noqa: B023
    assert [exit_of(each) for each in again] == [0] * len(POINTS)


def at_random(kind: str, folder: Path, batches: int, kills: int) -> None:
    """Kill one of two writers after the other, somewhere."""

    def start(writer: int) -> int:
        return forked(lambda: write_all(kind, folder, writer, batches))

    def written() -> int:
        logs = [folder / f"writer{writer}" for writer in (0, 1)]
        return max(len(log.read_text().splitlines()) if log.exists() else 0 for log in logs)

    writers = [start(0), start(1)]
    for number in range(kills):
        wait_until(lambda: written() >= batches * number // (kills + 1))  # noqa: B023
        time.sleep(random.uniform(0, 0.2))
        victim = random.randrange(2)
        os.kill(writers[victim], signal.SIGKILL)
        # It may have had nothing left to do.
        assert exit_of(writers[victim]) in (-signal.SIGKILL, 0)
        writers[victim] = start(victim)
    assert [exit_of(each) for each in writers] == [0, 0]


if __name__ == "__main__":
    chosen: Callable[..., None] = at_random if len(sys.argv) > 3 else at_points
    chosen(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
