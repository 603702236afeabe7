"""Whatever a handler does to its transaction, effect and record agree."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
from sqlalchemy import text
from tests.integration.drivers import engine_on
from tests.integration.hostile import CONSUMER, HANDLERS, End, Scene
from tests.records import record_of
from tests.turns import in_turn

from oncely._util import clock as process_clock
from oncely.consumer import Consumer
from oncely.core.errors import InDoubtError
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Key, Record, State
from oncely.ledger.ledger import Ledger
from oncely.once import once
from oncely.stores.memory_store import MemoryStore
from oncely.stores.open_store import sqlite_file
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine, sqlite_engine
from oncely.testing import ManualClock
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Limits

_LEASE_S = 60.0
_SETUP = (
    "CREATE TABLE effects (message VARCHAR(255), run INTEGER, part VARCHAR(10))",
    "CREATE TABLE accounts (id INTEGER PRIMARY KEY, total INTEGER)",
    "INSERT INTO accounts VALUES (0, 0), (1, 0)",
    "CREATE TABLE noise (n INTEGER)",
    "CREATE TABLE heavy (n INTEGER)",
    f"INSERT INTO heavy VALUES {', '.join(['(0)'] * 200)}",
)
_WAYS = ("a call, repeated in doubt", "a call, held in doubt", "a consumer")
_CASES = [
    case
    for name, hostile in HANDLERS.items()
    for case in in_turn(name, [(kind, name, way) for way in _WAYS for kind in hostile.ends])
]


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
        return record_of(self.scene.ledger, Key(CONSUMER, message_id or self.scene.message_id))

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


@pytest.fixture
def scene(kind: str, name: str, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A database of that kind for what is hostile, and a program with a single connection."""
    url = str(request.getfixturevalue(f"{kind}_ledger_url"))
    engine, other = engine_on(url, pool_size=1, max_overflow=0), engine_on(url)
    clock = ManualClock()
    store = SqlStore(
        sqlite_engine(sqlite_file(url)) if kind == "sqlite" else server_engine(url), clock=clock
    )
    with closing(Ledger(store)) as ledger:
        with other.begin() as connection:
            for statement in _SETUP:
                connection.execute(text(statement))
            if name == "SET ROLE":
                connection.execute(text("CREATE ROLE nobody_else SUPERUSER"))
        yield Scene(kind, clock, ledger, engine, other, "abc-123")
    if name == "SET ROLE":
        with other.begin() as connection:
            connection.execute(text("DROP ROLE nobody_else"))
    other.dispose()
    engine.dispose()


@pytest.mark.parametrize(("kind", "name", "way"), _CASES, ids=str)
def test_hostile_handler(scene: Scene, name: str, way: str) -> None:
    """Handled by `once(transaction=)` or by a transactional consumer."""
    match way:
        case "a consumer":
            check_consumer(Play(scene, name, Policy(lease=_LEASE_S)))
        case "a call, held in doubt":
            check_once(Play(scene, name, Policy(lease=_LEASE_S, on_in_doubt="hold")))
        case _:
            check_once(Play(scene, name, Policy(lease=_LEASE_S, on_in_doubt="retry")))


def check_once(play: Play) -> None:
    """Called again and again."""
    scene = play.scene
    guard = once(
        scene.ledger,
        consumer=CONSUMER,
        key=lambda message, *_: message.id,
        transaction=scene.engine,
        policy=play.policy,
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
    scene.clock.advance(_LEASE_S)
    for _ in range(2):
        with suppress(InDoubtError):
            charge(message)
    play.check_last()


class Following(process_clock.Clock):
    """The clock of a process in which as much time passes as for its ledger."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return super().monotonic() + self._clock.now


def check_consumer(play: Play) -> None:
    """The queue holds more. A lease passes whenever messages have ended."""
    scene = play.scene
    queue = StoreTransport(MemoryStore(), Limits(visibility_s=3600.0))
    queue.publish("in", [Message(scene.message_id), Message("next"), Message(scene.message_id)])
    consumer = Consumer(queue, "in").idempotent(scene.ledger, CONSUMER, policy=play.policy)
    consumer.transactional(scene.engine).backoff(0.01)
    with process_clock.replaced_by(Following(scene.clock)):
        consumer.consume(
            play.handle, drain=True, on_progress=lambda _: scene.clock.advance(_LEASE_S)
        )
    play.check_last()
    play.check_next("next")
