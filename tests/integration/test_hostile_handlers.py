"""Whatever a handler does to its transaction, effect and record agree."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from sqlalchemy import text
from tests.integration.hostile import CONSUMER, HANDLERS, End, Scene
from tests.integration.joiners import engine_on

from oncely.consumer import Consumer
from oncely.core.errors import InDoubtError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, State
from oncely.ledger import open_ledger
from oncely.once import once
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport

_LEASE = "800ms"
_PACE = 3
"""How much faster than ours the clock of the queue goes: what is busy comes back after a second."""
_SETUP = (
    "CREATE TABLE effects (message VARCHAR(255), run INTEGER, part VARCHAR(10))",
    "CREATE TABLE accounts (id INTEGER PRIMARY KEY, total INTEGER)",
    "INSERT INTO accounts VALUES (0, 0), (1, 0)",
    "CREATE TABLE noise (n INTEGER)",
    "CREATE TABLE heavy (n INTEGER)",
    f"INSERT INTO heavy VALUES {', '.join(['(0)'] * 200)}",
)
_CASES = [(kind, name) for name, hostile in HANDLERS.items() for kind in hostile.ends]


class Play:
    """A scene, in which a handler is hostile when it first runs, and not again."""

    def __init__(self, scene: Scene, name: str, policy: Policy) -> None:
        self.scene = scene
        self.hostile = HANDLERS[name]
        self.end = self.hostile.ends[scene.kind]
        self.policy = policy
        self.runs = 0

    def handle(self, message: Message, connection: Any) -> str:
        """Two effects, and what is hostile in between."""
        if message.id != self.scene.message_id:
            self._write(connection, message.id, 0)
            return "next"
        self.runs += 1
        run = self.runs
        self._effect(connection, run, "before")
        if run == 1 and not self.hostile.comes_last:
            self.hostile.act(self.scene, connection)
        self._effect(connection, run, "after")
        if run == 1 and self.hostile.comes_last:
            self.hostile.act(self.scene, connection)
        return f"run {run}"

    def _effect(self, connection: Any, run: int, part: str) -> None:
        self._write(connection, self.scene.message_id, run, part)

    def _write(self, connection: Any, message_id: str, run: int, part: str = "before") -> None:
        row = {"message": message_id, "run": run, "part": part}
        connection.execute(text("INSERT INTO effects VALUES (:message, :run, :part)"), row)

    # ---- The oracle ----------------------------------------------------------------------------

    def effects(self, message_id: str) -> dict[int, set[str]]:
        """The parts that each run has stored."""
        found: dict[int, set[str]] = defaultdict(set)
        with self.scene.other.connect() as connection:
            query = text("SELECT run, part FROM effects WHERE message = :message")
            for run, part in connection.execute(query, {"message": message_id}):
                assert part not in found[run], "an effect is doubled"
                found[run].add(part)
        return dict(found)

    def record(self, message_id: str | None = None) -> Record:
        record = self.scene.ledger.find(Key(CONSUMER, message_id or self.scene.message_id))
        assert record is not None, "there is no record"
        return record

    def check_first(self) -> None:
        """After the hostile run, effect and record agree."""
        effects, state = self.effects(self.scene.message_id), self.record().state
        match self.end:
            case End.DONE:
                assert (state, effects) == (State.COMPLETED, {1: {"before", "after"}})
            case End.UNDONE:
                assert (state, effects) == (State.FAILED, {})
            case End.DOUBT:
                assert state is State.PROCESSING
                assert set(effects) <= {1}

    def check_last(self) -> None:
        """After redeliveries it is neither lost nor doubled."""
        effects, state = self.effects(self.scene.message_id), self.record().state
        whole = {"before", "after"}
        if self.end is End.DONE:
            assert (state, effects) == (State.COMPLETED, {1: whole})
        elif self.end is End.UNDONE:
            assert (state, effects) == (State.COMPLETED, {2: whole})
        elif self.policy.on_in_doubt == "hold":
            assert (state, self.runs) == (State.PROCESSING, 1)
            assert set(effects) <= {1}
        else:
            assert (state, effects[2], self.runs) == (State.COMPLETED, whole, 2)

    def check_next(self, message_id: str) -> None:
        """The message that follows on the same connection is not disturbed."""
        assert self.effects(message_id) == {0: {"before"}}
        assert self.record(message_id).state is State.COMPLETED

    def await_lease(self) -> None:
        """Wait until the claim has run out."""
        lease_until = self.record().lease_until
        assert lease_until is not None
        while self.scene.ledger.now() < lease_until:
            time.sleep(0.05)


@pytest.fixture(params=_CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A kind of database, and what is hostile."""
    kind, name = request.param
    return kind, name


@pytest.fixture
def scene(case: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A database of that kind, and a program with a single connection."""
    kind, name = case
    url = str(request.getfixturevalue(f"{kind}_ledger_url"))
    engine, other = engine_on(url, pool_size=1, max_overflow=0), engine_on(url)
    with closing(open_ledger(url)) as ledger:
        with other.begin() as connection:
            for statement in _SETUP:
                connection.execute(text(statement))
            if name == "SET ROLE":
                connection.execute(text("CREATE ROLE nobody_else SUPERUSER"))
        # No lease is to run out while the first connection is made.
        ledger.counts()
        engine.connect().close()
        yield Scene(kind, ledger, engine, other, "abc-123")
    if name == "SET ROLE":
        with other.begin() as connection:
            connection.execute(text("DROP ROLE nobody_else"))
    other.dispose()
    engine.dispose()


@pytest.mark.parametrize("on_in_doubt", ["retry", "hold"])
def test_once(case: tuple[str, str], scene: Scene, on_in_doubt: Any) -> None:
    """`once(transaction=)`."""
    policy = Policy(lease=_LEASE, on_in_doubt=on_in_doubt)
    play = Play(scene, case[1], policy)
    guard = once(
        scene.ledger,
        consumer=CONSUMER,
        key=lambda message, *_: message.id,
        transaction=scene.engine,
        policy=policy,
    )
    charge: Callable[..., Any] = guard(play.handle)
    message = Message(scene.message_id)
    if play.end is End.DONE:
        assert charge(message) == "run 1"
    else:
        with pytest.raises(Exception):  # noqa: B017, PT011 - some meet errors of their own.
            charge(message)
    play.check_first()
    charge(Message("next"))
    play.check_next("next")
    if play.end is End.DOUBT:
        play.await_lease()
    with suppress(InDoubtError):
        charge(message)
    with suppress(InDoubtError):
        charge(message)
    play.check_last()


def test_consumer(case: tuple[str, str], scene: Scene) -> None:
    """A transactional consumer, of which the queue holds more."""
    policy = Policy(lease=_LEASE)
    play = Play(scene, case[1], policy)
    queue = StoreTransport(MemoryStore(lambda: _PACE * time.monotonic()))
    queue.publish("in", [Message(scene.message_id), Message("next"), Message(scene.message_id)])
    consumer = Consumer(queue, "in").idempotent(scene.ledger, CONSUMER, policy=policy)
    consumer.transactional(scene.engine).backoff(0.01).consume(play.handle, drain=True)
    play.check_last()
    play.check_next("next")
