"""What the other processes do in tests of a store that several processes share.

Functions of a module, so that `multiprocessing` can call them in processes that have nothing of
the one which starts them: forks of a server that has imported oncely, and no more.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.synchronize import Barrier
from typing import Any

from oncely.core.commands import Granted
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger

_DEADLINE_S = 180.0
_FRESH = get_context("forkserver")
# Each would import for longer than it works. What is not installed is passed over.
_PRELOADED = [__name__, "oncely.stores.sql.migrating", "oncely.stores.redis", "psycopg", "pymysql"]
_FRESH.set_forkserver_preload(_PRELOADED)

CONSUMER = "processes"


def key_of(number: int) -> Key:
    """The key that processes use for message `number`."""
    return Key(CONSUMER, f"message-{number}")


def claim_all(ledger: Ledger, keys: int, batch: int = 100) -> list[int]:
    """Claim messages 0 to `keys`, in batches; the numbers of those that were granted."""
    granted: list[int] = []
    for start in range(0, keys, batch):
        numbers = range(start, min(start + batch, keys))
        outcomes = ledger.claim_many([key_of(n) for n in numbers])
        pairs = zip(numbers, outcomes, strict=True)
        granted.extend(n for n, outcome in pairs if isinstance(outcome, Granted))
    return granted


def migrate_and_count(ledger: Ledger) -> int:
    """Migrate, and see that the table is there: how many records it holds."""
    ledger.migrate()
    return sum(ledger.counts().values())


def forked(call: Callable[[], object]) -> int:
    """A forked child that does that, and ends with 0 where it ends well: see `exit_of`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            call()
            status = 0
        finally:
            # A child of fork must never run on into pytest.
            os._exit(status)
    return child


def exit_of(child: int) -> int:
    """The exit status of a forked child, as soon as it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def printed(program: str, *options: str) -> str:
    """What a program prints that ends well, and in time, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", program],
        capture_output=True,
        check=False,
        text=True,
        timeout=_DEADLINE_S,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def run_at_once(processes: int, url: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(ledger, *args)` returns in each of so many fresh processes, started at once.

    Raises AssertionError where a process gives no answer.
    """
    start = _FRESH.Barrier(processes)
    pipes = [_FRESH.Pipe(duplex=False) for _ in range(processes)]
    started = [
        _FRESH.Process(target=_run, args=(start, answer, url, work, args)) for _, answer in pipes
    ]
    for process in started:
        process.start()
    try:
        return [_receive(question) for question, _ in pipes]
    finally:
        _end(started)


def start_completing(url: str, batch: int) -> tuple[ForkServerProcess, Connection]:
    """A process that claims and completes batch after batch until it is killed.

    After each batch it sends how many messages are completed so far.
    """
    question, answer = _FRESH.Pipe(duplex=False)
    process = _FRESH.Process(target=_complete_for_ever, args=(answer, url, batch))
    process.start()
    return process, question


def _run(
    start: Barrier, answer: Connection, url: str, work: Callable[..., Any], args: Sequence[Any]
) -> None:
    ledger = open_ledger(url)
    start.wait(_DEADLINE_S)
    answer.send(work(ledger, *args))


def _complete_for_ever(answer: Connection, url: str, batch: int) -> None:
    ledger = open_ledger(url)
    for start in itertools.count(0, batch):
        outcomes = ledger.claim_many([key_of(n) for n in range(start, start + batch)])
        ledger.complete_many([o.claim for o in outcomes if isinstance(o, Granted)])
        answer.send(start + batch)


def _receive(question: Connection) -> Any:
    if not question.poll(_DEADLINE_S):
        raise AssertionError("a process gave no answer")
    return question.recv()


def _end(processes: Sequence[ForkServerProcess]) -> None:
    for process in processes:
        process.join(_DEADLINE_S)
        if process.is_alive():
            process.kill()
