"""Workers at a queue in PostgreSQL, or a topic of Kafka, are killed and started again: none lost,
none doubled.
"""

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
from tests.integration.queue_worker import CONSUMER, LEASE, QUEUE, WINDOW
from tests.servers import Kafka, create_topic
from tests.turns import in_turn

from oncely import Message, open_ledger, open_transport
from oncely.core.record import State

MESSAGES = int(os.environ.get("ONCELY_TEST_QUEUE_KILLS", "300"))
WORKERS = 3 if MESSAGES <= 1_000 else 20
_KILLS = 2 * WORKERS
KAFKA_MESSAGES = int(os.environ.get("ONCELY_TEST_KAFKA_KILLS", "1000"))
_KAFKA_KILLS = max(6, KAFKA_MESSAGES // 1_500)
_KEYS = 50
_PAUSE_S = min(0.01, 60 / MESSAGES)
_BATCH = 500
_TIMEOUT_S = 600 + max(MESSAGES, KAFKA_MESSAGES) // 20
_ROOT = Path(__file__).parents[2]


class Campaign:
    """Workers of which another takes the place of each that is killed."""

    messages, workers, kills, pause_s = MESSAGES, WORKERS, _KILLS, _PAUSE_S

    def __init__(self, url: str, kind: str, transport: str) -> None:
        self._url, self._kind, self._transport = url, kind, transport
        self._workers: list[subprocess.Popen[bytes]] = []
        self._watch = psycopg.connect(url, autocommit=True)

    def run(self) -> None:
        """Publish, kill until enough were killed, and wait until all is done."""
        with self._watch, self._at_work():
            # Not before they work: those that are killed are to have something in hand.
            self._wait_for(1)
            for number in range(self.kills):
                # At any moment of their work.
                self._wait_for(int(self.messages * (number + random.random()) / (2 * self.kills)))
                self._interrupt(number, random.randrange(self.workers))
            self._wait_for(self.messages)
            self._wait_until_empty()

    def effects(self) -> tuple[int, int]:
        """How many there are, and of how many messages."""
        with psycopg.connect(self._url) as connection:
            return connection.execute("SELECT count(*), count(DISTINCT id) FROM effects").fetchone()  # type: ignore[return-value]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._watch.execute("CREATE TABLE effects (number serial, id text)")
        with closing(open_transport(self._transport)) as transport:
            for start in range(0, self.messages, _BATCH):
                ids = range(start, min(start + _BATCH, self.messages))
                transport.publish(QUEUE, [Message(str(n), key=self._key_of(n)) for n in ids])
        self._workers = [self._started() for _ in range(self.workers)]
        try:
            yield
        finally:
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.wait(60)

    def _key_of(self, number: int) -> str | None:
        # Some share a lane, in which they go one after another.
        return f"k{number // 10 % 20}" if number % 10 == 0 else None

    def _started(self) -> "subprocess.Popen[bytes]":
        program = ["-m", "tests.integration.queue_worker", self._url, self._kind]
        arguments = [sys.executable, *program, str(self.pause_s), self._transport]
        return subprocess.Popen(arguments, cwd=_ROOT, stderr=subprocess.DEVNULL)

    def _interrupt(self, number: int, place: int) -> None:
        self._replace(place, subprocess.Popen.kill)

    def _replace(self, place: int, end: "Callable[[subprocess.Popen[bytes]], None]") -> None:
        worker = self._workers[place]
        assert worker.poll() is None, "a worker has ended by itself"
        end(worker)
        worker.wait(120)
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


class KafkaCampaign(Campaign):
    """The same at a topic: workers also come and go, and the broker is restarted, and killed."""

    messages, workers, kills, pause_s = KAFKA_MESSAGES, 3, _KAFKA_KILLS, 0.0

    def __init__(self, url: str, kafka: Kafka, options: str) -> None:
        super().__init__(url, "transactional", f"{kafka.url}?prefetch=200&{options}")
        self._kafka = kafka

    def order(self) -> dict[str, list[int]]:
        """The numbers of each key, in the order in which they took effect."""
        numbers: dict[str, list[int]] = {}
        with psycopg.connect(self._url) as connection:
            for (number,) in connection.execute("SELECT id::int FROM effects ORDER BY number"):
                numbers.setdefault(self._key_of(number), []).append(number)
        return numbers

    def _key_of(self, number: int) -> str:
        return f"k{number % _KEYS}"

    def _interrupt(self, number: int, place: int) -> None:
        if number == self.kills // 3:
            self._kafka.restart()
        elif number == 2 * self.kills // 3:
            self._kafka.kill()
            self._kafka.start()
        ends = (subprocess.Popen.kill, subprocess.Popen.terminate)
        self._replace(place, random.choice(ends))

    def _wait_until_empty(self) -> None:
        super()._wait_until_empty()
        with closing(open_transport(self._transport)) as transport:
            wait_until(lambda: transport.is_drained(QUEUE), "the group has a lag")


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize(
    "options",
    [
        "session.timeout.ms=3000&partition.assignment.strategy=range",
        "session.timeout.ms=3000",
        "group.protocol=consumer",
    ],
    ids=["eager", "cooperative", "consumer"],
)
def test_killed_workers_at_kafka(private_kafka: Kafka, postgresql_url: str, options: str) -> None:
    """Each message takes effect once, those of a key in the order in which they were published."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
    create_topic(private_kafka.address, QUEUE, 3)
    campaign = KafkaCampaign(postgresql_url, private_kafka, options)
    campaign.run()
    assert campaign.effects() == (KAFKA_MESSAGES, KAFKA_MESSAGES)
    assert all(numbers == sorted(numbers) for numbers in campaign.order().values())


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("kind", in_turn("a queue's workers", ("transactional", "plain")))
def test_killed_workers(postgresql_url: str, kind: str) -> None:
    """Nothing is lost or left. With effects in the queue's database each message takes effect once;
    elsewhere only what a killed worker had in hand is repeated.
    """
    campaign = Campaign(postgresql_url, kind, f"{postgresql_url}?visibility={LEASE}")
    campaign.run()
    effects, ids = campaign.effects()
    assert ids == MESSAGES
    assert effects - ids <= (0 if kind == "transactional" else _KILLS * 2 * WINDOW)
    with closing(open_ledger(postgresql_url)) as ledger:
        assert ledger.counts() == {(CONSUMER, State.COMPLETED): MESSAGES}
