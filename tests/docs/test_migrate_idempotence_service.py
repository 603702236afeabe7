"""docs/how-to/migrate-idempotence-service.md: one queue of a bus, with its rows in PostgreSQL."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from tests.docs.sections import Page, deliveries

import oncely

_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-idempotence-service.md"
_COUNT = 40


class Bus:
    """A bus before and after, and the page's program in between."""

    def __init__(self, url: str) -> None:
        hidden = re.search(
            r"<!-- invisible-code-block: python\n(.*?)-->", _PAGE.read_text(), re.DOTALL
        )
        assert hidden
        known: dict[str, Any] = {}
        exec(hidden[1].replace("sqlite:///bus.db", url), known)
        self.engine: Engine = known["engine"]
        self.handled: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.dies: set[str] = set()
        self.refuses: set[str] = set()
        known["handle"] = self._handle
        known["send"] = self._send
        page = Page("migrate-idempotence-service", {"sqlite:///bus.db": url})
        self.before = page.run("Before and after", known, 0)["process_before"]
        known = page.run("Before and after", known)
        self.after, self.ledger = known["process"], known["ledger"]
        moving = page.run("Move one queue at a time", known)
        self.finish, self.copy = moving["finish_handled"], moving["copy_completed"]
        self.ids_with: Callable[[str], list[str]] = moving["ids_with"]
        self.copy_back = page.run("Roll back one queue", known)["copy_back"]

    def _handle(self, message: oncely.Message, send_later: Callable[..., None]) -> None:
        if f"handling {message.id}" in self.dies:
            raise KeyboardInterrupt
        if message.id in self.refuses:
            raise oncely.Unrecoverable("no such customer")
        self.handled[message.id] += 1
        for name in ("receipt", "copy"):
            send_later(f"{name}-for-{message.id}", "mail", b"{}")

    def _send(self, deferred_id: str, destination: str, body: object) -> None:
        if f"sending {deferred_id}" in self.dies:
            raise KeyboardInterrupt
        self.sent[deferred_id] += 1


@pytest.fixture
def bus(postgresql_url: str) -> Iterator[Bus]:
    """Nothing has arrived yet."""
    bus = Bus(postgresql_url)
    yield bus
    bus.ledger.close()
    bus.engine.dispose()


def _process_all(process: Callable[[oncely.Message], str], count: int) -> None:
    for message in deliveries(count):
        assert process(message) == "acknowledge"


def test_a_queue_moves_and_back(bus: Bus) -> None:
    """Workers that died at the worst places have left their rows: each message is handled once,
    and each that was deferred is sent once, before, after, and before again.
    """
    bus.dies = {"sending copy-for-order-3", "sending receipt-for-order-4", "handling order-5"}
    for message in deliveries(_COUNT, copies=1):
        try:
            bus.before(message)
        except KeyboardInterrupt:
            continue  # as a killed worker leaves it
    bus.dies.clear()
    assert bus.ids_with("processing") == ["order-5"]
    assert bus.finish() == 3
    assert bus.copy() == _COUNT - 1
    _process_all(bus.after, 2 * _COUNT)
    bus.copy_back()
    _process_all(bus.before, 2 * _COUNT)
    names = [f"order-{n}" for n in range(2 * _COUNT)]
    assert bus.handled == dict.fromkeys(names, 1)
    assert bus.sent == {f"{kind}-for-{name}": 1 for name in names for kind in ("receipt", "copy")}


def test_the_old_service_loses_what_its_worker_died_over(bus: Bus) -> None:
    """The page says so: the redelivery is acknowledged, and nothing was done. After, it is not."""
    bus.dies = {"handling order-5"}
    message = oncely.Message("order-5")
    with pytest.raises(KeyboardInterrupt):
        bus.before(message)
    assert bus.before(message) == "acknowledge"
    assert bus.handled["order-5"] == 0
    bus.dies.clear()
    assert bus.copy() == 0
    assert bus.after(message) == "acknowledge"
    assert bus.handled["order-5"] == 1


def test_a_message_that_failed_permanently_is_not_requeued(bus: Bus) -> None:
    """Each delivery of it goes to the error queue: requeued, it would come back forever."""
    bus.refuses = {"order-5"}
    message = oncely.Message("order-5")
    assert [bus.after(message) for _ in range(3)] == 3 * ["error queue"]


def test_a_queue_without_a_completed_message_moves_back(bus: Bus) -> None:
    """There is nothing to copy, and that is no error."""
    bus.copy_back()
    _process_all(bus.before, 1)
    assert bus.handled == {"order-0": 1}
