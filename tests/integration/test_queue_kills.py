"""Workers at a queue in PostgreSQL are killed and started again: none lost, none doubled."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.integration.queue_worker import CONSUMER, QUEUE, WINDOW

from oncely import Message, open_ledger, open_transport
from oncely.core.record import State

MESSAGES = int(os.environ.get("ONCELY_TEST_QUEUE_KILLS", "300"))
WORKERS = 3 if MESSAGES <= 1_000 else 20
_KILLS = 2 * WORKERS
_PAUSE_S = min(0.01, 60 / MESSAGES)
_BATCH = 500
_TIMEOUT_S = 300 + MESSAGES // 25
_ROOT = Path(__file__).parents[2]


class Campaign:
    """Workers of which another takes the place of each that is killed."""

    def __init__(self, url: str, kind: str) -> None:
        self._url, self._kind = url, kind
        self._workers: list[subprocess.Popen[bytes]] = []
        self._watch = psycopg.connect(url, autocommit=True)

    def run(self) -> None:
        """Publish, kill until enough were killed, and wait until all is done."""
        with self._watch, self._at_work():
            # Not before they work: those that are killed are to have something in hand.
            self._wait_for(1)
            for number in range(_KILLS):
                self._wait_for(MESSAGES * number // (2 * _KILLS))
                time.sleep(random.uniform(0.0, 0.3))
                self._kill(random.randrange(WORKERS))
            self._wait_for(MESSAGES)
            self._wait_until_empty()

    def effects(self) -> tuple[int, int]:
        """How many there are, and of how many messages."""
        with psycopg.connect(self._url) as connection:
            return connection.execute("SELECT count(*), count(DISTINCT id) FROM effects").fetchone()  # type: ignore[return-value]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._watch.execute("CREATE TABLE effects (number serial, id text)")
        with closing(open_transport(self._url)) as transport:
            for start in range(0, MESSAGES, _BATCH):
                ids = range(start, min(start + _BATCH, MESSAGES))
                # Some share a lane, in which they go one after another.
                keys = [f"k{n // 10 % 20}" if n % 10 == 0 else None for n in ids]
                transport.publish(
                    QUEUE, [Message(str(n), key=key) for n, key in zip(ids, keys, strict=True)]
                )
        self._workers = [self._started() for _ in range(WORKERS)]
        try:
            yield
        finally:
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.wait(60)

    def _started(self) -> "subprocess.Popen[bytes]":
        program = ["-m", "tests.integration.queue_worker", self._url, self._kind, str(_PAUSE_S)]
        return subprocess.Popen([sys.executable, *program], cwd=_ROOT, stderr=subprocess.DEVNULL)

    def _kill(self, place: int) -> None:
        assert self._workers[place].poll() is None, "a worker has ended by itself"
        self._workers[place].kill()
        self._workers[place].wait()
        self._workers[place] = self._started()

    def _wait_for(self, effects: int) -> None:
        self._wait("SELECT count(DISTINCT id) FROM effects", lambda found: found >= effects)

    def _wait_until_empty(self) -> None:
        self._wait("SELECT count(*) FROM waiting_messages", lambda found: found == 0)

    def _wait(self, question: str, is_answer: Callable[[int], bool]) -> None:
        until = time.monotonic() + _TIMEOUT_S / 2
        while not is_answer(found := self._watch.execute(question).fetchone()[0]):  # type: ignore[index]
            assert time.monotonic() < until, f"{question}: {found}"
            time.sleep(0.05)


@pytest.mark.timeout(_TIMEOUT_S)
def test_killed_transactional_workers(postgresql_url: str) -> None:
    """Effects in the queue's database: each message takes effect once, and nothing is left."""
    campaign = Campaign(postgresql_url, "transactional")
    campaign.run()
    assert campaign.effects() == (MESSAGES, MESSAGES)
    _check_records(postgresql_url)


@pytest.mark.timeout(_TIMEOUT_S)
def test_killed_workers(postgresql_url: str) -> None:
    """Effects elsewhere: none is lost, and only what a killed worker had in hand is repeated."""
    campaign = Campaign(postgresql_url, "plain")
    campaign.run()
    effects, ids = campaign.effects()
    assert ids == MESSAGES
    assert effects - ids <= _KILLS * 2 * WINDOW
    _check_records(postgresql_url)


def _check_records(url: str) -> None:
    with closing(open_ledger(url)) as ledger:
        assert ledger.counts() == {(CONSUMER, State.COMPLETED): MESSAGES}
