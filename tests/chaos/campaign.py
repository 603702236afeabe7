"""A campaign: messages go through workers while these, the servers and the connections are struck.

What comes of it is for `check` to say.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psycopg
from tests.chaos.check import (
    HELD,
    MODES,
    ORDERED,
    OUT,
    REPEATED,
    fails_permanently,
    faults,
    key_of,
    left_of,
    lines_of,
    rows_of,
)
from tests.chaos.worker import Task
from tests.chaos.workers import COUNT, Workers
from tests.conditions import LIMIT_S, wait_until
from tests.servers import Postgresql, Rabbitmq, Server

from oncely.core.errors import TransportError
from oncely.core.message import Message
from oncely.core.waiting import OUTBOX
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.outbox import Relay
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport

_COPIES = 0.2
"""Which part of all messages is published for the second time."""
_MESSAGES_PER_STRIKE = 200
"""In a long campaign; in a short one each kind of strike comes once."""
_ALARM_S = 3.0
"""For longer than a lease."""
_EFFECTS = "CREATE TABLE effects (message_id text, fence bigint, pid bigint)"
_TERMINATE = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
_CLOSE = """
    [rabbit_networking:close_connection(Pid, "chaos") || Pid <- rabbit_networking:connections()]
"""

Strike = Callable[[], object]


class Servers(NamedTuple):
    """Where the messages and the ledger are."""

    queue_url: str
    postgresql: Postgresql
    rabbitmq: Rabbitmq | None = None
    """None where the queue is a file."""


class Campaign:
    """All that is drawn in it follows from `seed`; what happens meanwhile takes its own time."""

    def __init__(self, folder: Path, servers: Servers, messages: int, seed: int) -> None:
        self._folder = folder
        self._servers = servers
        self._random = random.Random(seed)
        self._workers = Workers(Task(servers.queue_url, servers.postgresql.url, str(folder)))
        self._ids = self._drawn_ids(messages)
        self._strikes = self._drawn_strikes(messages)

    def run(self) -> None:
        """Until all is settled. Raises AssertionError where that takes too long."""
        (self._folder / "published").write_text("\n".join(self._ids))
        with self._opened() as (ledger, transport):
            ledger.migrate()
            transport.subscribe(OUT, [])
        self._execute(_EFFECTS)
        with closing(self._workers), ThreadPoolExecutor(1) as producer:
            self._workers.start()
            self._strike_on_and_on(producer)
            self._workers.drain()
            self._await_the_end()
        with self._opened() as (ledger, transport):
            _tell(f"{_send_the_rest(ledger, transport)} are sent in the end")

    @contextmanager
    def _opened(self) -> Iterator[tuple[Ledger, Transport]]:
        with (
            closing(open_ledger(self._servers.postgresql.url)) as ledger,
            closing(open_transport(self._servers.queue_url)) as transport,
        ):
            yield ledger, transport

    def faults(self) -> list[str]:
        """What must not be, a sentence each."""
        published = (self._folder / "published").read_text().split()
        found = []
        for mode in MODES:
            urls = self._servers.queue_url, self._servers.postgresql.url
            left = left_of(mode, self._folder, *urls)
            found += faults(mode, published, left)
            effects = sum(map(len, left.effects.values()))
            again = effects - len(left.effects)
            _tell(f"{mode}: {effects} effects, {again} of them again; {len(left.dead)} set aside")
        return found

    def _drawn_ids(self, messages: int) -> list[str]:
        """In the order of publishing, with copies."""
        copies = round(messages * _COPIES)
        ids = [str(number) for number in range(messages - copies)]
        ids += self._random.choices(ids, k=copies)
        self._random.shuffle(ids)
        return ids

    def _drawn_strikes(self, messages: int) -> list[tuple[str, Strike]]:
        kinds = [*self._strikes_at_workers(), *self._strikes_at_servers()]
        strikes = kinds * max(1, messages // (_MESSAGES_PER_STRIKE * len(kinds)))
        self._random.shuffle(strikes)
        return strikes

    def _strikes_at_workers(self) -> list[tuple[str, Strike]]:
        workers = self._workers

        def one(strike: Callable[[int], None]) -> Strike:
            # Rather one that is at work than one that begins.
            return lambda: strike(self._random.choice(workers.at_work() or range(COUNT)))

        return [
            *[("a worker is killed", one(workers.kill))] * 3,
            ("a worker is frozen", one(workers.freeze)),
            ("a worker is stopped", one(workers.stop)),
        ]

    def _strikes_at_servers(self) -> list[tuple[str, Strike]]:
        postgresql, rabbitmq = self._servers.postgresql, self._servers.rabbitmq
        strikes: list[tuple[str, Strike]] = [
            ("PostgreSQL's connections are closed", lambda: self._execute(_TERMINATE)),
        ]
        if rabbitmq is not None:
            strikes.append(
                ("RabbitMQ's connections are closed", lambda: rabbitmq.evaluate(_CLOSE.strip()))
            )
            strikes.append(("RabbitMQ has no memory for a while", partial(_alarm, rabbitmq)))
        for server in filter(None, (postgresql, rabbitmq)):
            strikes.append((f"{server.name} is restarted", server.restart))
            strikes.append((f"{server.name} is killed", partial(_kill, server)))
        return strikes

    def _strike_on_and_on(self, producer: ThreadPoolExecutor) -> None:
        seen: set[str] = set()
        with closing(open_transport(self._servers.queue_url)) as transport:
            for number, (what, strike) in enumerate(self._strikes):
                share = self._share(number)
                # At any moment while these are handled.
                new = {each for each in set(share) - seen if not fails_permanently(each)}
                effects = self._effects() + self._random.randint(0, len(new))
                seen.update(share)
                queues = self._random.sample(MODES, len(MODES))
                published = producer.submit(_publish, transport, queues, share)
                self._wait_until(partial(self._has_effects, effects), published)
                _tell(f"{number + 1} of {len(self._strikes)}, at {effects} effects: {what}")
                strike()
                self._wait_until(published.done, published)

    def _share(self, number: int) -> Sequence[str]:
        """What is published with that strike: in the order of all."""
        first, last = (len(self._ids) * n // len(self._strikes) for n in (number, number + 1))
        return self._ids[first:last]

    def _has_effects(self, effects: int) -> bool:
        return self._effects() >= effects

    def _await_the_end(self) -> None:
        _tell(f"all is published, at {self._done()} effects")
        wait_until(
            self._workers.are_done,
            lambda: f"they do not end, at {self._done()} effects:\n{self._workers.last_words()}",
            limit_s=LIMIT_S + len(self._ids) / 10,
        )

    def _done(self) -> list[int]:
        """How many effects there are in each mode."""
        outside = [len(lines_of(mode, self._folder)) for mode in (HELD, REPEATED, ORDERED)]
        return [len(rows_of(self._servers.postgresql.url)), *outside]

    def _effects(self) -> int:
        """How many there are in the mode that gets on whatever happens."""
        return len(lines_of(REPEATED, self._folder))

    def _wait_until(self, condition: Callable[[], bool], published: "Future[None]") -> None:
        def holds() -> bool:
            self._workers.check()
            if published.done():
                published.result()
            return condition()

        wait_until(holds, lambda: f"they stand still:\n{self._workers.last_words()}")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._servers.postgresql.url) as connection:
            connection.execute(statement)


def _tell(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def _kill(server: Server) -> None:
    server.kill()
    server.start()


def _alarm(rabbitmq: Rabbitmq) -> None:
    limit = "vm_memory_monitor:set_vm_memory_high_watermark({})"
    rabbitmq.evaluate(limit.format(0.0))
    try:
        time.sleep(_ALARM_S)
    finally:
        rabbitmq.evaluate(limit.format(0.4))


def _send_the_rest(ledger: Ledger, transport: Transport) -> int:
    """Send what the killed have left, also what they hold for a while; return how many it was."""
    sent = 0
    relay = Relay(ledger, transport)

    def none_waits() -> bool:
        nonlocal sent
        sent += relay.send_waiting().sent
        return ledger.mailbox.free_in_s(OUTBOX) is None

    wait_until(none_waits, "what waits to be sent is held for ever")
    return sent


def _publish(transport: Transport, queues: Sequence[str], ids: Sequence[str]) -> None:
    """Until the broker has all: what it is asked for again it may have twice."""
    for queue in queues:
        keys = [key_of(message_id) if queue == ORDERED else None for message_id in ids]
        messages = [Message(id_, id_.encode(), key=key) for id_, key in zip(ids, keys, strict=True)]
        wait_until(partial(_is_published, transport, queue, messages), "the broker stays away")


def _is_published(transport: Transport, queue: str, messages: Sequence[Message]) -> bool:
    try:
        transport.publish(queue, messages)
    except TransportError:
        return False
    return True
