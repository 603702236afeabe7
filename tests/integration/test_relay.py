"""Relays over real databases and a queue in a file: several at once, killed, woken."""

import os
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.integration.relaying import CONSUMER, DESTINATION, arrived, defer, relays
from tests.servers import Postgresql

from oncely.core.message import Message
from oncely.core.record import State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.outbox import Relay
from oncely.transports.open_transport import open_transport

_RELAYS = 4
_MESSAGES = int(os.environ.get("ONCELY_TEST_RELAYED", "400"))
_LANES = _MESSAGES // 25


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a ledger without a row in a database of each kind."""
    found: str = request.getfixturevalue(f"{request.param}_ledger_url")
    return found


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """That ledger."""
    with closing(open_ledger(url)) as ledger:
        yield ledger


@pytest.fixture
def queues(tmp_path: Path) -> str:
    """The URL of queues in a file, which are there."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with closing(open_transport(url)) as transport:
        transport.subscribe(DESTINATION, [])
    return url


def is_through(ledger: Ledger) -> bool:
    return ledger.mailbox.backlog().waiting == 0


def check_order(messages: list[Message], places: int) -> None:
    """Each lane came in its order, and all of it."""
    lanes = defaultdict(list)
    for message in messages:
        lanes[message.key].append(int(message.body))
    assert set(map(tuple, lanes.values())) == {tuple(range(places))}


@pytest.mark.in_turn("processes are killed")
def test_several_relays(ledger: Ledger, url: str, queues: str) -> None:
    """Four processes send each message once, each lane in order, and complete what is done."""
    with relays(_RELAYS, url, queues) as started:
        for relay in started:
            relay.begin(batch=20, poll="20ms")
        defer(ledger, _MESSAGES, _LANES)
        wait_until(lambda: is_through(ledger), programs=[relay.program for relay in started])
        sent = [relay.end() for relay in started]
    assert sum(sent) == _MESSAGES
    messages = arrived(queues)
    assert len({message.id for message in messages}) == len(messages) == _MESSAGES
    check_order(messages, _MESSAGES // _LANES)
    assert ledger.counts() == {(CONSUMER, State.COMPLETED): _MESSAGES}


@pytest.mark.in_turn("processes are killed")
@pytest.mark.parametrize(
    ("url", "point"),
    [
        ("sqlite", "after_publish"),
        ("postgresql", "after_publish"),
        ("postgresql", "between_sends"),
    ],
    indirect=["url"],
)
def test_a_relay_is_killed(ledger: Ledger, url: str, queues: str, point: str) -> None:
    """Killed between publishing and marking: what is not marked comes again, none is lost."""
    messages, batch = 60, 10
    defer(ledger, messages, lanes=5)
    with relays(1, url, queues, ONCELY_CRASH_POINT=f"{point}:3") as [doomed]:
        doomed.begin(batch=batch, visibility="1s")
        assert doomed.await_crash() == signal.SIGKILL
    published, waiting = len(arrived(queues)), ledger.mailbox.backlog().waiting
    assert 1 <= published - (messages - waiting) <= batch
    with relays(1, url, queues) as [heir]:
        heir.begin(batch=batch, poll="20ms")
        wait_until(lambda: is_through(ledger), programs=[heir.program])
        assert heir.end() == waiting
    copies = arrived(queues)
    assert len(copies) == published + waiting
    once = list({message.id: message for message in copies}.values())
    assert len(once) == messages
    check_order(once, messages // 5)
    assert ledger.counts() == {(CONSUMER, State.COMPLETED): messages}


# ---- Running -----------------------------------------------------------------------------------


@contextmanager
def running(relay: Relay) -> Iterator[None]:
    """The relay runs in a thread for as long as the block, and has looked for messages before."""
    stop, has_looked = threading.Event(), threading.Event()
    thread = threading.Thread(target=relay.run, args=[stop, lambda _: has_looked.set()])
    thread.start()
    try:
        assert has_looked.wait(LIMIT_S)
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_woken(postgresql_url: str, queues: str) -> None:
    """On PostgreSQL a relay that waits is woken: it does not come when its next look is due."""
    with closing(open_ledger(postgresql_url)) as ledger, closing(open_transport(queues)) as queue:
        ledger.migrate()
        with running(Relay(ledger, queue, poll="1h")):
            for number in range(3):
                defer(ledger, messages=1, lanes=1, consumer=f"shop-{number}")
                wait_until(lambda: is_through(ledger))


def test_the_database_is_away(private_postgresql: Postgresql, queues: str) -> None:
    """A relay outlives a restart of the database, and sends what comes after it."""
    with (
        closing(open_ledger(private_postgresql.url)) as ledger,
        closing(open_transport(queues)) as queue,
    ):
        ledger.migrate()
        with running(Relay(ledger, queue)):
            defer(ledger, messages=10, lanes=3)
            private_postgresql.kill()
            private_postgresql.start()
            defer(ledger, messages=10, lanes=3, consumer="another")
            wait_until(lambda: is_through(ledger))
    assert len({message.id for message in arrived(queues)}) == 20
