"""Ledgers that are dropped without `close`: nothing of them stays."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import event
from tests.conditions import wait_until
from tests.records import granted

from oncely import AsyncLedger, once, open_ledger
from oncely.core.record import Key
from oncely.stores.sql.sql_store import SqlStore

_LEDGERS = 20


def _use(path: Path) -> None:
    """Open a ledger there; use its threads: the recorder's, the workers', and a heartbeat's."""
    ledger = open_ledger(f"sqlite:///{path}")
    ledger.migrate()
    ledger.complete(granted(ledger.claim(Key("billing", "1"))))
    granted(asyncio.run(AsyncLedger(ledger).claim(Key("billing", "2"))))

    @once(ledger, consumer="billing", key=str)
    def charge(_: int) -> None:
        return None

    charge(3)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted by Linux")
def test_dropped_ledgers(tmp_path: Path) -> None:
    """Their threads end, and their files are closed."""
    threads = {*threading.enumerate()}
    _use(tmp_path / "warm.db")
    gc.collect()
    wait_until(lambda: {*threading.enumerate()} <= threads)
    files = _open_files()
    for number in range(_LEDGERS):
        _use(tmp_path / f"{number}.db")

    def is_as_before() -> bool:
        gc.collect()
        return {*threading.enumerate()} <= threads and _open_files() <= files

    wait_until(
        is_as_before,
        lambda: f"{_open_files()} open files; {[each.name for each in threading.enumerate()]}",
    )


def test_dropped_while_it_tells(tmp_path: Path) -> None:
    """What its recorder's thread tells the store meanwhile leaves no session open either."""
    ledger = open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    sessions: Counter[str] = Counter()
    engine = cast(SqlStore, ledger._store)._engine
    for name in ("connect", "close"):
        event.listen(engine, name, lambda *_, name=name: sessions.update([name]))
    ledger.migrate()
    recorder = ledger.recorder
    del ledger, engine
    gc.collect()
    recorder.tell()
    del recorder
    gc.collect()
    assert sessions["connect"] == sessions["close"] > 0


_ENDS = """
import sys, threading, weakref
import oncely

ledger = oncely.open_ledger(sys.argv[1])
ledger.migrate()
assert ledger.claim(oncely.Key("billing", "1"))
weakref.finalize(
    ledger, lambda: print([each.name for each in threading.enumerate() if each.daemon])
)
"""


def test_end_of_a_program(tmp_path: Path) -> None:
    """Its ledgers' threads end before Python looks through its finalizers, of which SQLAlchemy has
    one for each connection in use: else a thread that takes one meanwhile is a traceback.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _ENDS, f"sqlite:///{tmp_path}/ledger.db"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
