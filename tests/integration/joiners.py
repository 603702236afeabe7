"""Processes whose threads all deliver the same messages, each delivery in its own transaction."""

import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, make_url, text
from tests.conditions import LIMIT_S

from oncely.core.commands import Granted
from oncely.core.errors import ContentionError
from oncely.core.record import Key
from oncely.ledger import Ledger, open_ledger

ROOT = Path(__file__).parents[2]
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}

_TRIES = 100


def engine_on(url: str, **settings: Any) -> Engine:
    """An engine as a program has one that knows nothing of oncely."""
    at, more = as_a_program(url)
    return create_engine(at.set(drivername=DRIVERS[at.get_backend_name()]), **more, **settings)


def as_a_program(url: str) -> tuple[URL, dict[str, Any]]:
    """Where a ledger's URL leads, and the settings of an engine: behind a pooler it prepares
    nothing.
    """
    at = make_url(url)
    if "prepare_threshold" not in at.query:
        return at, {}
    threshold = {"prepare_threshold": None}
    return at.difference_update_query(list(threshold)), {"connect_args": threshold}


def deliver(ledger: Ledger, engine: Engine, key: Key) -> int:
    """Handle one delivery; how often its transaction lost against others before."""
    for lost in range(_TRIES):
        try:
            with engine.begin() as connection, ledger.transaction(connection) as inbox:
                outcome = inbox.claim(key)
                if isinstance(outcome, Granted):
                    row = {"message": key.message_id}
                    connection.execute(text("INSERT INTO effects (message) VALUES (:message)"), row)
                    inbox.complete(outcome.claim)
            return lost
        except ContentionError:
            time.sleep(random.uniform(0.0, 0.01))
    raise AssertionError(f"lost {_TRIES} times")


def run_processes(url: str, processes: int, threads: int, messages: int) -> int:
    """Let the threads of each process deliver each message; how often some lost.

    Raises AssertionError where any says a word of an error.
    """
    numbers = (str(threads), str(messages))
    command = [sys.executable, "-m", "tests.integration.joiners", url, *numbers]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(processes)
    ]
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    complaints = [complaint for _, complaint in said if complaint]
    if complaints or any(process.returncode for process in started):
        raise AssertionError("\n".join(complaints) or "a process was killed")
    return sum(int(lost) for lost, _ in said)


def _main(url: str, threads: int, messages: int) -> None:
    ledger = open_ledger(url)
    engine = engine_on(url, pool_size=threads)
    keys = [Key("storm", f"message-{n}") for n in range(messages)]
    # Each process in an order of its own, but near enough for deliveries to meet.
    keys.sort(key=lambda key: int(key.message_id.partition("-")[2]) + random.uniform(0, 20))
    with ThreadPoolExecutor(threads) as pool:
        lost = sum(pool.map(lambda key: deliver(ledger, engine, key), keys))
    sys.stdout.write(str(lost))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
