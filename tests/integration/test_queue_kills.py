"""Workers at a queue in PostgreSQL are killed and started again: none lost, none doubled."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.conditions import wait_until
from tests.integration.queue_worker import CONSUMER, QUEUE, WINDOW
from tests.turns import in_turn

from oncely import Message, open_ledger, open_transport
from oncely.core.record import State

MESSAGES = int(os.environ.get("ONCELY_TEST_QUEUE_KILLS", "300"))
WORKERS = 3 if MESSAGES <= 1_000 else 20
_KILLS = 2 * WORKERS
_PAUSE_S = min(0.01, 60 / MESSAGES)
_BATCH = 500
_TIMEOUT_S = 600 + MESSAGES // 25
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
                # At any moment of their work.
                self._wait_for(int(MESSAGES * (number + random.random()) / (2 * _KILLS)))
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
        def found() -> int:
            [[count]] = self._watch.execute(question)
            return int(count)

        wait_until(
            lambda: is_answer(found()), lambda: f"{question}: {found()}", limit_s=_TIMEOUT_S / 2
        )


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("kind", in_turn("a queue's workers", ("transactional", "plain")))
def test_killed_workers(postgresql_url: str, kind: str) -> None:
    """Nothing is lost or left. With effects in the queue's database each message takes effect once;
    elsewhere only what a killed worker had in hand is repeated.
    """
    campaign = Campaign(postgresql_url, kind)
    campaign.run()
    effects, ids = campaign.effects()
    assert ids == MESSAGES
    assert effects - ids <= (0 if kind == "transactional" else _KILLS * 2 * WINDOW)
    with closing(open_ledger(postgresql_url)) as ledger:
        assert ledger.counts() == {(CONSUMER, State.COMPLETED): MESSAGES}
