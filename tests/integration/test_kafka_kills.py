"""Workers at a topic of Kafka are killed and come and go, and the broker restarts: none lost, none
doubled, each key in its order.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.conditions import wait_until
from tests.integration.kafka_worker import CONSUMER, QUEUE
from tests.servers import Kafka

from oncely import Message, open_ledger, open_transport
from oncely.core.record import State

MESSAGES = int(os.environ.get("ONCELY_TEST_KAFKA_KILLS", "2000"))
_KEYS = 50
_DUPLICATES = 20
"""One message in so many is published twice."""
_PARTITIONS = 3
_WORKERS = 3
_EVENTS = 6 if MESSAGES <= 5_000 else MESSAGES // 1_500
"""How often a worker is killed, or leaves, and another comes."""
_BATCH = 500
_TIMEOUT_S = 600 + MESSAGES // 20
_ROOT = Path(__file__).parents[2]
# A worker that was killed leaves the group as late as its session ends.
_OPTIONS = "?rdkafka.session.timeout.ms=3000&rdkafka.heartbeat.interval.ms=300&prefetch=200"
_PROTOCOLS = (
    f"{_OPTIONS}&rdkafka.partition.assignment.strategy=range",
    _OPTIONS,
    "?prefetch=200&rdkafka.group.protocol=consumer",
)


class Campaign:
    """Workers of which another takes the place of each that is killed or leaves."""

    def __init__(self, kafka: Kafka, options: str, database: str) -> None:
        self._kafka, self._options, self._database = kafka, options, database
        self._workers: list[subprocess.Popen[bytes]] = []
        self._watch = psycopg.connect(database, autocommit=True)

    def run(self) -> None:
        """Publish, and let things happen until all is done."""
        with self._watch, self._at_work():
            self._wait_for(1)
            restarts = {_EVENTS // 3: self._kafka.restart, 2 * _EVENTS // 3: self._start_again}
            for number in range(_EVENTS):
                # At any moment of their work.
                self._wait_for(int(MESSAGES * (number + random.random()) / (_EVENTS + 1)))
                if restart := restarts.get(number):
                    restart()
                self._replace(random.randrange(_WORKERS), is_killed=random.random() < 0.6)
            self._wait_for(MESSAGES)
            self._wait_until_acknowledged()

    def _start_again(self) -> None:
        self._kafka.kill()
        self._kafka.start()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._watch.execute(
            "CREATE TABLE effects (place serial, id text, key text, number integer)"
        )
        self._publish()
        self._workers = [self._started() for _ in range(_WORKERS)]
        try:
            yield
        finally:
            for worker in self._workers:
                worker.terminate()
            for worker in self._workers:
                worker.wait(120)

    def _publish(self) -> None:
        self._kafka.create_topic(QUEUE, _PARTITIONS)
        with closing(open_transport(self._kafka.url)) as transport:
            for start in range(0, MESSAGES, _BATCH):
                messages = []
                for n in range(start, min(start + _BATCH, MESSAGES)):
                    body = b'{"number": %d}' % n
                    messages.append(Message(str(n), body, key=f"k{n % _KEYS}"))
                again = random.sample(messages, len(messages) // _DUPLICATES)
                transport.publish(QUEUE, messages)
                transport.publish(QUEUE, again)

    def _started(self) -> "subprocess.Popen[bytes]":
        program = ["-m", "tests.integration.kafka_worker", self._kafka.url + self._options]
        return subprocess.Popen(
            [sys.executable, *program, self._database], cwd=_ROOT, stderr=subprocess.DEVNULL
        )

    def _replace(self, place: int, *, is_killed: bool) -> None:
        worker = self._workers[place]
        assert worker.poll() is None, "a worker has ended by itself"
        if is_killed:
            worker.kill()
        else:
            worker.terminate()
        worker.wait(120)
        self._workers[place] = self._started()

    def _wait_for(self, effects: int) -> None:
        def found() -> int:
            [[count]] = self._watch.execute("SELECT count(DISTINCT id) FROM effects")
            return int(count)

        wait_until(
            lambda: found() >= effects,
            lambda: f"{found()} of {effects}",
            limit_s=_TIMEOUT_S / 2,
            pause_s=0.05,
        )

    def _wait_until_acknowledged(self) -> None:
        with closing(open_transport(self._kafka.url + self._options)) as transport:
            wait_until(lambda: transport.is_drained(QUEUE), "the group has a lag", pause_s=0.5)


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
@pytest.mark.parametrize("options", _PROTOCOLS, ids=("eager", "cooperative", "consumer"))
def test_killed_workers(private_kafka: Kafka, postgresql_url: str, options: str) -> None:
    """Each message takes effect once, those of a key in the order in which they were published."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
    Campaign(private_kafka, options, postgresql_url).run()
    with psycopg.connect(postgresql_url) as connection:
        effects = connection.execute("SELECT id, key, number FROM effects ORDER BY place")
        told = effects.fetchall()
    assert len({id_ for id_, _, _ in told}) == MESSAGES
    assert len(told) == MESSAGES
    for key in {key for _, key, _ in told}:
        numbers = [number for _, of, number in told if of == key]
        assert numbers == sorted(numbers)
    with closing(open_ledger(postgresql_url)) as ledger:
        assert ledger.counts() == {(CONSUMER, State.COMPLETED): MESSAGES}
