"""The port of a command, asked over HTTP: what is wrong is told, and what is not is not."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import Got, got
from tests.logs import events_in, of_event

from oncely import Consumer, Key, Message
from oncely._util.signals import told_to_stop
from oncely.cli.monitoring import monitored
from oncely.cli.options import RunOptions
from oncely.consumer import source
from oncely.consumer.health import Health, Pulse
from oncely.core.errors import StoreUnavailable, TransportError
from oncely.ledger.ledger import Ledger
from oncely.stores.memory_store import MemoryStore
from oncely.transports.store_transport import StoreTransport
from oncely.transports.transport import Delivery


class AwayLedger(Ledger):
    def now(self) -> float:
        raise StoreUnavailable("db:5432: no route; password=geheim")


class LostTransport(StoreTransport):
    """Its broker is lost when it has delivered so often, and is back when it was missed twice."""

    def __init__(self, received: int) -> None:
        super().__init__(MemoryStore())
        self.pulse: Pulse
        self.unready: list[str | None] = []
        """What was said before each call."""
        self._results = [*([True] * received), False, False]

    def receive(self, queue: str, max_messages: int, wait_s: float) -> Sequence[Delivery]:
        is_there = not self._results or self._results.pop(0)
        self.unready.append(self.pulse.health().unready)
        if not is_there:
            raise TransportError("amqp://u:geheim@h: lost")
        return super().receive(queue, max_messages, wait_s)


Ask = Callable[..., Got]


@pytest.fixture
def ask(caplog: pytest.LogCaptureFixture) -> Ask:
    """What a path answers, of a command with these processes and this ledger."""

    def ask(
        path: str,
        healths: dict[str, Health],
        ledger: Ledger | None = None,
        workers: dict[str, str] | None = None,
    ) -> Got:
        caplog.clear()
        running = RunOptions(metrics_port=0)
        with (
            caplog.at_level("INFO", "oncely"),
            monitored(running, ledger, lambda: healths, workers),
        ):
            [served] = of_event(caplog, "metrics_served")
            return got(f"http://127.0.0.1:{vars(served)['port']}{path}")

    return ask


FINE = Health(0.1, None)


def test_a_loop_that_stands_still(ask: Ask) -> None:
    """It is told, with the process; such a process is not ready either."""
    healths = {"worker 1": FINE, "worker 2": Health(75.0, None)}
    said = "worker 2: the loop has not moved for 75 s\n"
    assert ask("/live", healths) == (503, said)
    assert ask("/ready", healths) == (503, said)
    assert ask("/live", {"": Health(59.0, None)}).status == 200


def test_what_is_not_ready(ask: Ask) -> None:
    """It is told why, and the process is live."""
    healths = {"worker 1": Health(0.1, "it is to be started"), "worker 2": FINE}
    assert ask("/ready", healths) == (503, "worker 1: it is to be started\n")
    assert ask("/live", healths).status == 200


def test_who_is_stopping(ask: Ask) -> None:
    """Whoever was told to stop is not ready, and lives as long as that takes."""
    with told_to_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(60)
        assert ask("/ready", {"": FINE}) == (503, "it is stopping\n")
        assert ask("/live", {"": Health(75.0, None)}).status == 200


def test_what_cannot_be_told(ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error is answered as one, and logged."""
    (tmp_path / "counter_1.db").write_bytes(b"no")
    status, text = ask("/metrics", {"": FINE}, workers={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})
    assert (status, text) == (500, "internal error: see the log\n")
    [logged] = of_event(caplog, "monitoring_failed")
    assert vars(logged)["path"] == "/metrics"


def test_a_ledger_that_is_away(ask: Ask) -> None:
    """It is told without its password."""
    status, text = ask("/ready", {"": FINE}, AwayLedger(MemoryStore()))
    assert status == 503
    assert text.startswith("the ledger cannot be reached: StoreUnavailable: db:5432: no route")
    assert "geheim" not in text


@pytest.mark.parametrize("quickly", [True, False])
def test_doubts_are_shown_where_they_are_counted_quickly(*, quickly: bool, ask: Ask) -> None:
    """Nobody has to ask for the gauges of records, unless a scrape would read the whole table."""

    class Counting(MemoryStore):
        counts_quickly = quickly

    ledger = Ledger(Counting())
    ledger.claim(Key("billing", "1"))
    text = ask("/metrics", {"": FINE}, ledger).text
    assert ('oncely_in_doubt{consumer="billing"} 0.0' in text) is quickly
    assert "oncely_deferred_waiting 0.0" in text


@pytest.mark.parametrize("received", [0, 1])
def test_a_consumer_whose_broker_is_lost(
    received: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for its broker, is not ready until that is back, and then goes on."""
    monkeypatch.setattr(source, "_AWAY_S", 0.001)
    transport = LostTransport(received)
    transport.publish("orders", [Message("1"), Message("2")])
    consumer = Consumer(transport, queue="orders").window(1)
    transport.pulse = consumer.pulse
    pulse_at_start = consumer.pulse.health().unready
    with caplog.at_level("INFO", "oncely"):
        report = consumer.consume(lambda _: None, drain=True)
    assert report.handled == 2
    said = [pulse_at_start, *[None] * received]
    lost = "the broker cannot be reached: TransportError: amqp://u:***@h: lost"
    assert transport.unready[: len(said) + 2] == [*said, lost, lost]
    assert consumer.pulse.health().unready is None
    assert events_in(caplog)[1:] == ["broker_unavailable", "broker_available"]
