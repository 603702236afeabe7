"""Workers that die, by one of their messages or by themselves: what it costs, and whom."""

import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from sqlalchemy import create_engine, text
from tests.conditions import LIMIT_S, wait_until
from tests.integration.dying_worker import CONSUMER, DEATHS, QUEUE, TRIES, engine_url
from tests.turns import in_turn, is_whole_run

from oncely import Message, open_ledger, open_transport
from oncely.core.record import Key

MESSAGES = 400 if is_whole_run() else 60
KILLED = 100 if is_whole_run() else 40
KILL_EVERY_S = 2.0
_ROOT = Path(__file__).parents[2]
_LIMIT_S = 3 * LIMIT_S


class Place(NamedTuple):
    """A ledger, a queue, and what handlers have done."""

    ledger_url: str
    queue_url: str
    log: Path

    def publish(self, *messages: Message) -> None:
        """Put these into the queue."""
        with closing(open_transport(self.queue_url)) as transport:
            transport.publish(QUEUE, messages)

    def started(self, kind: str, pause_s: float = 0.0) -> "subprocess.Popen[bytes]":
        """A worker, which ends when all is done."""
        program = [sys.executable, "-m", "tests.integration.dying_worker"]
        arguments = [self.ledger_url, self.queue_url, kind, str(self.log), str(pause_s)]
        return subprocess.Popen([*program, *arguments], cwd=_ROOT)

    def runs(self) -> Counter[str]:
        """How often the handler has begun with each message."""
        return Counter(line.split()[0] for line in self.log.read_text().splitlines())

    def effects(self) -> Counter[str]:
        """How often each message has had its effect."""
        engine = create_engine(engine_url(self.ledger_url))
        with engine.connect() as connection:
            found = Counter(connection.execute(text("SELECT id FROM effects")).scalars())
        engine.dispose()
        return found

    def dead(self) -> dict[str, str]:
        """Why which messages are dead letters."""
        with closing(open_ledger(self.ledger_url)) as ledger:
            return {each.message.id: each.reason for each in ledger.mailbox.dead(CONSUMER, 10_000)}


PLACES = ("rabbitmq quorum", "rabbitmq classic", "sqlite", "postgresql")
KINDS = ("plain", "transactional", "held", "together")
"""Those that are `held` are transactional, and what is in doubt is held."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Queues of each kind; the ledger is where the queue is, or on PostgreSQL."""
    where = request.param
    kind = "sqlite" if where == "sqlite" else "postgresql"
    ledger_url = request.getfixturevalue(f"{kind}_ledger_url")
    queue_url = f"{ledger_url}?visibility=2s"
    if where.startswith("rabbitmq"):
        url = request.getfixturevalue("rabbitmq_url")
        queue_url = f"{url}?queue_type={where.split()[1]}"
    engine = create_engine(engine_url(ledger_url))
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (id TEXT)"))
    engine.dispose()
    log = tmp_path / "runs"
    log.touch()
    yield Place(ledger_url, queue_url, log)
    with closing(open_ledger(ledger_url)) as ledger:
        assert not ledger.problems()


CASES = [(where, kind, how) for where in PLACES for kind in KINDS for how in DEATHS]


@pytest.mark.timeout(2 * _LIMIT_S)
@pytest.mark.parametrize(
    ("place", "kind", "how"), in_turn("a message kills its worker", CASES, 2), indirect=["place"]
)
def test_a_message_kills_its_worker(place: Place, kind: str, how: str) -> None:
    """It costs as many deaths as it has tries, and one; then it is a dead letter. All others are
    handled, and none of them twice but those that were at work at the first death.
    """
    killer, ids = str(MESSAGES // 2), [str(number) for number in range(MESSAGES)]
    bodies = {killer: how.encode()}
    place.publish(*(Message(each, bodies.get(each, b"{}")) for each in ids))
    deaths, deadline = 0, time.monotonic() + _LIMIT_S
    while place.started(kind).wait(deadline - time.monotonic()):
        deaths += 1
        assert deaths <= TRIES + 1, place.runs().most_common(5)
    assert deaths == place.runs()[killer]
    [(dead, reason)] = place.dead().items()
    assert dead == killer
    assert reason.endswith(f": its worker died {TRIES} times")
    effects = place.effects()
    assert {*effects} == {*ids} - {killer}
    if kind != "plain":
        assert {*effects.values()} == {1}
    assert max(effects.values()) <= 2
    with closing(open_ledger(place.ledger_url)) as ledger:
        record = ledger.find(Key(CONSUMER, killer))
        assert record is not None
        assert record.attempts == TRIES


@pytest.mark.timeout(2 * _LIMIT_S)
@pytest.mark.parametrize("place", in_turn("no doubt", PLACES), indirect=True)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_death_in_a_transaction_leaves_no_doubt(place: Place, kind: str) -> None:
    """It is rolled back, also where the claim was committed before it: of a suspect, and of a
    retry. So the message runs again, whatever the policy does with what is in doubt.
    """
    place.publish(Message("suspect", b"kill kill {}"), Message("retry", b"raise kill {}"))
    while place.started(kind).wait(_LIMIT_S):
        assert place.runs().total() < 20
    assert place.dead() == {}
    assert place.effects() == {"suspect": 1, "retry": 1}


@pytest.mark.timeout(2 * _LIMIT_S)
@pytest.mark.parametrize(
    ("place", "kind"),
    in_turn("workers are killed", [(where, kind) for where in PLACES for kind in KINDS], 1),
    indirect=["place"],
)
def test_workers_are_killed(place: Place, kind: str) -> None:
    """All is handled, and no message pays for that: none is a dead letter."""
    ids = [str(number) for number in range(KILLED)]
    place.publish(*(Message(each, b"{}") for each in ids))
    workers = [place.started(kind, pause_s=0.05) for _ in range(2)]
    kill_at = time.monotonic() + KILL_EVERY_S

    def are_done() -> bool:
        nonlocal kill_at
        if time.monotonic() > kill_at:
            kill_at += KILL_EVERY_S
            victim = random.randrange(len(workers))
            workers[victim].kill()
            workers[victim].wait()
            workers[victim] = place.started(kind, pause_s=0.05)
        return len(place.effects()) == KILLED

    try:
        wait_until(are_done, lambda: place.effects(), limit_s=_LIMIT_S, pause_s=0.05)
        for worker in workers:
            assert worker.wait(_LIMIT_S) == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert place.dead() == {}
    if kind != "plain":
        assert {*place.effects().values()} == {1}
