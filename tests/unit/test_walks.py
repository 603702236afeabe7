"""What a message costs in code: its way through each face has a budget, which only shrinks."""

import asyncio
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.conditions import wait_until
from tests.walks import Walk, Walker

import oncely
from oncely import Consumer, Ledger, Message
from oncely.http import IdempotencyKey
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery

# calls, functions, files, objects, statements (of SQLite: transactions' ends are among them).
BUDGETS = {
    "once": Walk(136, 104, 27, 20, 6),
    "consumer, memory": Walk(408, 204, 43, 24, 0),
    "consumer, SQLite": Walk(408, 203, 47, 22, 6),
    "http": Walk(290, 183, 37, 29, 6),
    "spark, memory, 1": Walk(397, 246, 49, 55, 0),
    "spark, SQLite, 1": Walk(412, 254, 52, 54, 10),
    "spark, memory, 1000": Walk(75_000, 260, 48, 11_100, 0),
    "spark, SQLite, 1000": Walk(76_500, 279, 51, 11_110, 46),
}
"""At most so much for new messages, where all has run before. Threads that wait for each other do
not look equally often each time: there is a little room for that.
"""

OpenIn = Callable[[str], Ledger]

_BEFORE = 3
_ROUNDS = 5
_MOST_ROUNDS = 100
"""On a busy machine threads that wait look more often: until one message has met none of that."""


def least(walks: Sequence[Walk]) -> Walk:
    """What each of them needed: anything more came by chance, as a heartbeat does."""
    return Walk(*(min(column) for column in zip(*walks, strict=True)))


PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md"


def check_page(walker: Walker, title: str) -> None:
    """The page lists files of this walk, in the order in which a message comes to them."""
    sections = PAGE.read_text().split("\n## ")
    [section] = [each for each in sections if each.startswith(f"{title}\n")]
    listed = re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)
    assert listed
    assert [file for file in walker.way if file in listed] == listed


def over(name: str, walk: Walk) -> dict[str, tuple[int, int]]:
    """What is over the budget: needed, and allowed."""
    return {
        field: (needed, most)
        for field, needed, most in zip(Walk._fields, walk, BUDGETS[name], strict=True)
        if needed > most
    }


def check(name: str, walks: Sequence[Walk]) -> None:
    """What a message needed is within its budget."""
    walk = least(walks[_BEFORE:])
    found = over(name, walk)
    assert not found, f"{name}: needed and allowed: {found}; in all: {walk}"


@pytest.fixture
def walker() -> Walker:
    """Counts."""
    return Walker()


@pytest.fixture
def open_in(tmp_path: Path) -> OpenIn:
    """Opens a ledger in memory, or in a file."""
    urls = {"memory": "memory://", "SQLite": f"sqlite:///{tmp_path / 'ledger.db'}"}

    def opened(where: str) -> Ledger:
        ledger = oncely.open_ledger(urls[where])
        ledger.migrate()
        return ledger

    return opened


def test_once(walker: Walker, open_in: OpenIn) -> None:
    """A call of a function under `once`, on SQLite."""
    walks: list[Walk] = []
    with walker.followed(), closing(open_in("SQLite")) as ledger:

        @oncely.once(ledger, consumer="billing", key=str)
        def charge(_: int) -> None:
            return None

        for number in range(_BEFORE + _ROUNDS):
            walker.begin()
            charge(number)
            walks.append(walker.end())
    check("once", walks)
    check_page(walker, "A call of a function under `once`")


class WatchedTransport(StoreTransport):
    """Counts from a delivery until the consumer has found the queue empty afterwards."""

    def __init__(self, walker: Walker) -> None:
        super().__init__(MemoryStore())
        self._walker = walker
        self._is_acknowledged = threading.Event()
        self.walks: list[Walk] = []
        self._is_under_way = False

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        deliveries = super().receive(queue, max_messages, wait_s)
        if deliveries:
            self._is_under_way = True
            self._walker.begin()
        elif self._is_under_way and self._is_acknowledged.is_set():
            self._is_under_way = False
            self._is_acknowledged.clear()
            self.walks.append(self._walker.end())
        return deliveries

    def acknowledge(self, verdicts: Sequence[tuple[Delivery, Any]]) -> None:
        super().acknowledge(verdicts)
        self._is_acknowledged.set()


@pytest.mark.parametrize("where", ["memory", "SQLite"])
def test_consumer(walker: Walker, open_in: OpenIn, where: str) -> None:
    """A delivery of a consumer, from a queue in memory."""
    transport, name = WatchedTransport(walker), f"consumer, {where}"
    with walker.followed(), closing(open_in(where)) as ledger:
        consumer = Consumer(transport, queue="in").idempotent(ledger, "billing")
        consuming = threading.Thread(target=consumer.consume, args=(lambda _: None,))
        consuming.start()
        try:
            for number in range(_BEFORE + _MOST_ROUNDS):
                transport.publish("in", [Message(str(number))])
                wait_until(lambda number=number: len(transport.walks) > number)  # type: ignore[misc]
                walks = transport.walks[_BEFORE:]
                if len(walks) >= _ROUNDS and not over(name, least(walks)):
                    break
        finally:
            consumer.stop()
            consuming.join()
    check(name, transport.walks)
    check_page(walker, "A delivery of a consumer")


def test_http(walker: Walker, open_in: OpenIn) -> None:
    """A request with an idempotency key, over ASGI, on SQLite."""
    walks: list[Walk] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(app: Any, key: str) -> None:
        headers = [(b"idempotency-key", f'"{key}"'.encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/orders",
            "raw_path": b"/orders",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "state": {},
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        await app(scope, receive, send)
        assert sent[0]["status"] == 201

    async def ask_all(app: Any) -> None:
        for number in range(_BEFORE + _ROUNDS):
            walker.begin()
            await ask(app, f"order-{number}")
            walks.append(walker.end())

    with walker.followed(), closing(open_in("SQLite")) as ledger:
        asyncio.run(ask_all(IdempotencyKey(application, ledger, consumer="api")))
    check("http", walks)
    check_page(walker, "A request with an idempotency key")


@pytest.mark.parametrize("where", ["memory", "SQLite"])
@pytest.mark.parametrize("count", [1, 1_000])
def test_spark(
    walker: Walker,
    open_in: OpenIn,
    tmp_path: Path,
    where: str,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task of mode leased, by itself, with one message and with many."""
    from tests.spark.tasks import run_task

    from oncely.spark.modes import chunks, leased

    # Where the machine is slow, a task takes smaller chunks, and stores and looks more often.
    for module, name in (
        *((chunks, "_QUICK_S"), (chunks, "_SLOW_S"), (chunks, "_LOOK_S")),
        (leased, "_STORE_EVERY_S"),
    ):
        monkeypatch.setattr(module, name, 600.0)
    walks: list[Walk] = []
    with walker.followed(), closing(open_in(where)) as ledger:
        for number in range(_BEFORE + _ROUNDS):
            ids = [f"{number}-{each}" for each in range(count)]
            walker.begin()
            run_task(ledger, lambda _: None, tmp_path, ids)
            walks.append(walker.end())
    check(f"spark, {where}, {count}", walks)
    if count == 1:
        check_page(walker, "A task of Spark")
