"""Producers and relays are killed and started again: exactly what was committed arrives."""

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import pika
import psycopg
import pytest
from tests.conditions import wait_until
from tests.integration.producing import WORK
from tests.integration.relaying import DESTINATION, ROOT, RelayProcess

from oncely import open_ledger, open_transport

TRANSACTIONS = int(os.environ.get("ONCELY_TEST_RELAY_KILLS", "300"))
"""Commits, rollbacks and kills together."""
_KILLS = max(4, TRANSACTIONS // 500)
_PRODUCERS = _RELAYS = 2
_TIMEOUT_S = 600 + TRANSACTIONS // 50


class Campaign:
    """Producers and relays of which another takes the place of each that is killed."""

    def __init__(self, ledger_url: str, queue_url: str, folder: Path) -> None:
        self._ledger_url, self._queue_url = ledger_url, queue_url
        self._tally = folder / "tally"
        self._tally.touch()
        self._producers: list[subprocess.Popen[bytes]] = []
        self._relays: list[RelayProcess] = []

    def run(self) -> None:
        """Kill at random until there were enough transactions; then relay the rest."""
        with self._at_work():
            for number in range(1, _KILLS + 1):
                self._wait(partial(self._has_ended, TRANSACTIONS * number // _KILLS - number))
                self._kill_a_producer() if random.random() < 0.5 else self._kill_a_relay()
            for producer in self._producers:
                producer.kill()
                producer.wait()
            self._wait(lambda: self._waiting() == 0)

    def ended(self) -> int:
        """How many transactions have come to their ends."""
        return self._tally.stat().st_size

    def _has_ended(self, transactions: int) -> bool:
        return self.ended() >= transactions

    def told(self) -> str:
        """What has happened."""
        ends = self._tally.read_bytes()
        return f"{ends.count(b'c')} commits, {ends.count(b'r')} rollbacks, {_KILLS} kills"

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with ExitStack() as stack:
            self._relays = [self._started_relay(stack) for _ in range(_RELAYS)]
            self._producers = [self._started_producer(stack) for _ in range(_PRODUCERS)]
            self._stack = stack
            yield

    def _started_producer(self, stack: ExitStack) -> "subprocess.Popen[bytes]":
        program = ["-m", "tests.integration.producing", self._ledger_url, str(self._tally)]
        producer = subprocess.Popen([sys.executable, *program], cwd=ROOT)
        stack.callback(producer.wait)
        stack.callback(producer.kill)
        return producer

    def _started_relay(self, stack: ExitStack) -> RelayProcess:
        relay = RelayProcess(self._ledger_url, self._queue_url)
        stack.callback(relay.close)
        relay.begin(batch=50, visibility="2s", poll="50ms")
        return relay

    def _kill_a_producer(self) -> None:
        place = random.randrange(_PRODUCERS)
        assert self._producers[place].poll() is None, "a producer has ended by itself"
        self._producers[place].kill()
        self._producers[place].wait()
        self._producers[place] = self._started_producer(self._stack)

    def _kill_a_relay(self) -> None:
        place = random.randrange(_RELAYS)
        assert self._relays[place].is_alive(), "a relay has ended by itself"
        self._relays[place].close()
        self._relays[place] = self._started_relay(self._stack)

    def _waiting(self) -> int:
        with psycopg.connect(self._ledger_url) as connection:
            [count] = connection.execute("SELECT count(*) FROM waiting_messages").fetchone() or [0]
            return int(count)

    def _wait(self, holds: Callable[[], bool]) -> None:
        wait_until(
            holds,
            lambda: f"they stand still: {self.told()}, {self.ended()}, {self._waiting()}",
            limit_s=_TIMEOUT_S,
        )


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(_TIMEOUT_S)
def test_killed_producers_and_relays(
    postgresql_url: str, rabbitmq_url: str, tmp_path: Path
) -> None:
    """Of random transactions exactly the messages of those that were committed arrive, at least
    once, each under its id.
    """
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.subscribe(DESTINATION, [])
    with psycopg.connect(postgresql_url) as connection:
        connection.execute(WORK)
    campaign = Campaign(postgresql_url, rabbitmq_url, tmp_path)
    campaign.run()
    with psycopg.connect(postgresql_url) as connection:
        committed = {row[0]: {row[1]} for row in connection.execute("SELECT id, body FROM work")}
    arrived, copies = _arrived(rabbitmq_url)
    sys.stderr.write(f"{campaign.told()}: {len(committed)} messages, {copies} of them again\n")
    assert {*arrived} == {*committed}
    assert arrived == committed


def _arrived(url: str) -> tuple[Mapping[str, set[str]], int]:
    """The bodies of what is in the queue by their ids, and how many came more than once."""
    bodies: dict[str, set[str]] = defaultdict(set)
    count = 0
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        channel = connection.channel()
        left = channel.queue_declare(DESTINATION, passive=True).method.message_count
        for _, properties, body in channel.consume(DESTINATION, auto_ack=True):
            bodies[properties.message_id or ""].add(body.decode())
            count += 1
            if count == left:
                break
    return bodies, count - len(bodies)
