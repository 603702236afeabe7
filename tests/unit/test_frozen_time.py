"""Programs under test that freeze the time, as with freezegun: nothing here waits for it."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest

from oncely import Consumer, Message, current, once, open_ledger, open_transport

_NOW_S = 1_700_000_000.0


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Freezes the time, when asked: the clocks of the module `time` stand still."""
    yield monkeypatch
    monkeypatch.undo()


def _freeze(freezing: pytest.MonkeyPatch) -> None:
    for name in ("time", "monotonic", "perf_counter"):
        freezing.setattr(time, name, lambda: _NOW_S)


def test_a_step_in_frozen_time(tmp_path: Path, freezing: pytest.MonkeyPatch) -> None:
    """The handler's lease does not seem to be over."""
    with closing(open_ledger(f"sqlite:///{tmp_path}/ledger.db")) as ledger:
        ledger.migrate()

        @once(ledger, consumer="billing", key=lambda number: number, lease="1m")
        def bill(number: str) -> str:
            _freeze(freezing)
            processing = current()
            assert processing is not None
            step: str = processing.step("charge", lambda: number)
            return step

        assert bill("1") == "1"


def test_retries_in_frozen_time(tmp_path: Path, freezing: pytest.MonkeyPatch) -> None:
    """A consumer tries again what has failed, by the database's clock."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    tried: list[str] = []

    def handle(message: Message) -> None:
        tried.append(message.id)
        if len(tried) == 1:
            raise ValueError("the first try")

    with closing(open_ledger(url)) as ledger, closing(open_transport(url)) as transport:
        ledger.migrate()
        transport.publish("bills", [Message("1", b"")])
        consumer = Consumer(url, queue="bills").idempotent(ledger, "billing").backoff(0.1)
        _freeze(freezing)
        thread = Thread(target=consumer.consume, args=[handle], kwargs={"drain": True}, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    assert tried == ["1", "1"]
