"""Fixtures of the tests of consumers."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import Engine, create_engine, text
from tests.conditions import LIMIT_S
from tests.meddling import MeddlingStore
from tests.records import record_of

from oncely.consumer import Consumer, window
from oncely.consumer.sink import DeliverySink
from oncely.consumer.turn import DeliveryTurn
from oncely.core.errors import StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record
from oncely.core.verdicts import Ack, DeadLetter, Ending, Verdict
from oncely.core.waiting import WaitingMessage
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.lifecycle.heartbeat import Heartbeat
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery


class Keyless(MemoryStore):
    """Queues that know nothing of ordering keys, as those of a broker."""

    def put(self, queue: str, messages: Sequence[Message]) -> None:
        rows = [replace(row, lane=row.name) for row in WaitingMessage.queued(queue, messages)]
        self.transaction(lambda transaction: transaction.keep(rows))


class Queue(StoreTransport):
    """A queue of its own in memory, which is told what its consumers make of what it delivers."""

    def __init__(self) -> None:
        self.store = Keyless()
        super().__init__(self.store)
        self.verdicts: list[Verdict] = []
        self._dead: dict[str, str] = {}

    def note(self, message: Message, verdict: Verdict) -> None:
        """A turn has ended so."""
        self.verdicts.append(verdict)
        if isinstance(verdict, DeadLetter):
            self._dead[message.id] = verdict.reason

    def put(self, *ids: str, **fields: Any) -> None:
        """Publish messages of these ids."""
        self.publish("in", [Message(message_id, b"{}", **fields) for message_id in ids])

    def make(self, *names: str) -> None:
        """Let there be queues of these names."""
        for name in names:
            self.subscribe(name, [])

    def put_aside(self) -> dict[str, str]:
        """Why which messages are dead letters."""
        return self._dead


class Once(Queue):
    """One from which every message is gone after its delivery, whatever the verdict; it says that
    it has delivered them `count` times.
    """

    count = 1

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        taken = super().receive(queue, max_messages, wait_s)
        return [replace(delivery, count=self.count) for delivery in taken]

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Any]]) -> None:
        super().acknowledge([(delivery, Ack()) for delivery, _ in verdicts])


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer with nothing to do looks for messages at once; its queue is told how turns end."""
    count = DeliverySink.count

    def noting(self: Any, turn: DeliveryTurn, ending: Ending) -> None:
        count(self, turn, ending)
        if isinstance(self._transport, Queue):
            self._transport.note(turn.message, ending.verdict)

    monkeypatch.setattr(DeliverySink, "count", noting)
    monkeypatch.setattr(window, "_IDLE_S", 0.005)


@pytest.fixture
def live() -> Ledger:
    """A ledger in memory by the machine's own clock: what waits there comes back by itself."""
    return Ledger(MemoryStore())


@pytest.fixture(params=["memory", "sqlite"])
def any_ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger that needs no server."""
    urls = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path / 'ledger.db'}"}
    with closing(open_ledger(urls[request.param])) as ledger:
        ledger.migrate()
        yield ledger


@pytest.fixture
def queue(no_rest: None) -> Queue:
    """An empty queue."""
    return Queue()


Deliver = Callable[..., Verdict]


@pytest.fixture
def deliver(ledger: Ledger, no_rest: None) -> Deliver:
    """Brings one message to a handler, with a ledger in memory; gives the verdict."""

    def once(
        handler: Callable[..., Any],
        message: Message = Message("1", b"{}"),
        policy: Policy = Policy(),
        count: int = 1,
    ) -> Verdict:
        queue = Once()
        queue.count = count
        # As it is, whatever a broker would say of it.
        queue.store.put("in", [message])
        consumer = Consumer(queue, "in").idempotent(ledger, "billing", policy=policy)
        # What it puts off would come again.
        consumer.consume(handler, drain=True, on_progress=lambda _: consumer.stop())
        return queue.verdicts[0]

    return once


class Stall:
    """A write that is held up until it may go on."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def hold(self) -> None:
        self.reached.set()
        assert self.go_on.wait(LIMIT_S)

    async def is_reached(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, LIMIT_S)


def extended(ledger: Ledger) -> list[Claim]:
    """The claims that are extended until they are let go."""
    beats = [kept for kept in ledger._kept.values() if isinstance(kept, Heartbeat)]
    return [claim for each in beats for claim, _ in each._held.values()]


class Outage:
    """Between `begin` and `end` the store can neither be written nor read."""

    def __init__(self, store: MeddlingStore, patched: pytest.MonkeyPatch) -> None:
        self._store = store
        self._patched = patched

    def begin(self, calls: float = math.inf) -> None:
        """From now on, or for so many calls."""
        self._left = calls
        self._patched.setattr(self._store, "meddle", self._fail)
        self._patched.setattr(self._store, "load", self._fail)

    def end(self) -> None:
        self._patched.undo()

    def _fail(self, *_: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            self.end()
        raise StoreUnavailable("the store is away")


@pytest.fixture
def outage(meddling: MeddlingStore) -> Iterator[Outage]:
    """Of the ledger in memory; it has not begun."""
    with pytest.MonkeyPatch.context() as patched:
        yield Outage(meddling, patched)


def failing(times: int, error: BaseException, then: Callable[..., Any]) -> Callable[..., Any]:
    """`then`, after it has raised `error` so often."""
    left = iter(range(times))

    def call(*arguments: Any, **named: Any) -> Any:
        for _ in left:
            raise error
        return then(*arguments, **named)

    return call


def nothing(*_: object, **__: object) -> None:
    pass


class Sql(NamedTuple):
    """A ledger on a SQLite file, and an engine to its database, which has a table of effects."""

    ledger: Ledger
    engine: Engine

    def effects(self) -> list[str]:
        with self.engine.connect() as connection:
            return [name for [name] in connection.execute(text("SELECT name FROM effects"))]

    def record(self, message_id: str) -> Record:
        return record_of(self.ledger, Key("billing", message_id))


@pytest.fixture
def sql(sqlite_ledger_url: str) -> Iterator[Sql]:
    """A ledger with transactions, and what handlers may write to."""
    engine = create_engine(sqlite_ledger_url)
    with closing(open_ledger(engine)) as ledger:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE effects (name TEXT)"))
        yield Sql(ledger, engine)
    engine.dispose()
