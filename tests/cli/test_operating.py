"""What a command that works for long lets be seen of itself: its log, its port, how it ends."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Got, got, ran_here
from tests.conditions import ended_by, wait_until
from tests.records import granted

from oncely import Key, Message, open_ledger, open_transport
from oncely.core.waiting import WaitingMessage

MODULE = """
import os, time
from pathlib import Path
import oncely
from oncely.middleware import Logged

FOLDER = Path(__file__).parent
ledger = oncely.open_ledger(f"sqlite:///{FOLDER}/ledger.db")
consumer = (
    oncely.Consumer(f"sqlite:///{FOLDER}/queue.db", queue="orders")
    .middleware(Logged())
    .idempotent(ledger, "shop")
    .tries(2).backoff(["10ms"])
    .grace("60s")
)

@consumer.handler
def handle(message):
    (FOLDER / f"{message.id}.begun").touch()
    match message.type:
        case "fail":
            raise ValueError("postgresql://u:geheim@h\\nand more")
        case "slow":
            time.sleep(300)
        case "wait":
            while not (FOLDER / "go").exists():
                time.sleep(0.01)
"""
MEASURED = """
from oncely.middleware import Measured
from works import consumer
consumer.middleware(Measured())
"""
SECRET = b'{"card": "4111"}'


class Works:
    """A folder with a consumer, and commands at work on it; what they say goes to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "works.py").write_text(MODULE)
        self.url = f"sqlite:///{folder}/ledger.db"
        self.ledger = open_ledger(self.url)
        self.ledger.migrate()
        self.queue = open_transport(f"sqlite:///{folder}/queue.db")
        self.queue.subscribe("out", [])
        self.started: list[subprocess.Popen[bytes]] = []

    def publish(self, *ids: str, type_: str = "") -> None:
        self.queue.publish("orders", [Message(id_, SECRET, type_) for id_ in ids])

    def consume(self, *arguments: str) -> list[str]:
        return ["consume", "works:consumer", "--log-format", "json", *arguments]

    def relay(self, *arguments: str) -> list[str]:
        queue = f"sqlite:///{self.folder}/queue.db"
        how = ["--ledger", self.url, "--transport", queue, "--log-format", "json"]
        return ["relay", *how, *arguments]

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Start a command in a process of its own."""
        with (self.folder / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "oncely", *arguments],
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        self.started.append(process)
        return process

    def run(self, arguments: list[str]) -> int:
        """Run a command in this process, to its end."""
        ran = ran_here(*arguments)
        (self.folder / "said").write_text(ran.err)
        return ran.code

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    @property
    def events(self) -> list[dict[str, Any]]:
        """What is logged so far: every whole line on stderr is an object."""
        whole = [line for line in self.said.splitlines(keepends=True) if line[-1] == "\n"]
        assert all(line.startswith("{") for line in whole), self.said
        return [*map(json.loads, whole)]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    def wait_for(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.of(event)) >= count)
        return self.of(event)

    def begun(self, id_: str) -> bool:
        return (self.folder / f"{id_}.begun").exists()


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Works]:
    """The current folder, in which commands work, all of which end with the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    works = Works(tmp_path)
    with closing(works.ledger), closing(works.queue):
        yield works
        (tmp_path / "go").touch()
        for process in works.started:
            process.kill()
            process.wait()
    if (module := sys.modules.pop("works", None)) is not None:
        module.ledger.close()


Get = Callable[[str], Got]


@pytest.fixture
def port(works: Works) -> Get:
    """Ask the command that is at work, on the port that it has logged."""

    def ask(path: str) -> Got:
        [served] = works.wait_for("metrics_served")
        assert served["host"] == "127.0.0.1"
        return got(f"http://127.0.0.1:{served['port']}{path}")

    return ask


def sample(text: str, name: str) -> float | None:
    """The value of the sample that begins so."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    return None


# ---- The log -----------------------------------------------------------------------------------


def test_the_log_of_a_consumer(works: Works) -> None:
    """Start, each failure with its traceback, stop with the counts; no payload and no password."""
    works.publish("a")
    works.publish("b", type_="fail")
    assert works.run(works.consume("--drain")) == 1
    [started] = works.of("consumer_started")
    assert started["level"] == "info"
    assert (started["consumer"], started["queue"]) == ("works:consumer", "orders")
    failures = works.of("handler_failed")
    tried = [(each["message_id"], each["attempt"], each["next_try_in_s"]) for each in failures]
    assert tried == [("b", 1, 0.01), ("b", 2, None)]
    assert all('raise ValueError("postgresql' in each["exception"] for each in failures)
    assert all("u:***@h" in each["exception"] for each in failures)
    assert all("of message 'b' failed: ValueError: " in each["message"] for each in failures)
    [stopped] = works.of("consumer_stopped")
    assert (stopped["handled"], stopped["failed"], stopped["retried"]) == (1, 1, 1)
    assert works.events[0] == started
    assert works.events[-1] == stopped
    assert "geheim" not in works.said.replace('raise ValueError(\\"postgresql://u:geheim', "")
    assert "4111" not in works.said


def test_the_log_as_text(works: Works) -> None:
    """A line that people can read, and the traceback below it; what is below the level is not
    logged.
    """
    works.publish("b c", type_="fail")
    works.run(["consume", "works:consumer", "--drain"])
    first, *rest = works.said.splitlines()
    started = "consumer works:consumer of queue 'orders' has started; workers: 1"
    assert f" INFO    {started} event=consumer_started" in first
    failed = next(n for n, line in enumerate(rest) if line.endswith(" event=handler_failed"))
    why = "ValueError: postgresql://u:***@h\\nand more"
    said = f" WARNING the handler of message 'b c' failed: {why}; it is tried again in 0.01 s "
    assert said in rest[failed]
    assert rest[failed + 1] == "  Traceback (most recent call last):"
    works.publish("d", type_="fail")
    works.run(works.consume("--drain", "--log-level", "warning"))
    assert {each["level"] for each in works.events} == {"warning"}
    works.publish("e")
    works.run(works.consume("--drain", "--log-level", "error"))
    assert works.said == ""


def test_the_log_of_workers(works: Works) -> None:
    """Lines of all workers come out whole, each with its worker's number and process."""
    works.publish(*map(str, range(60)), type_="fail")
    assert works.start(works.consume("--drain", "--workers", "2")).wait(120) == 1
    failures = works.of("handler_failed")
    assert len(failures) == 120
    started = works.of("worker_started")
    assert {each["worker"] for each in started} == {1, 2}
    assert {each["pid"] for each in failures} <= {each["pid"] for each in started}
    assert works.events[-1]["event"] == "consumer_stopped"
    assert works.events[-1]["failed"] == 60


def test_a_mistake_in_the_log(works: Works) -> None:
    """Where stderr is for a program, a mistake is an object, too."""
    assert works.run(works.consume("--transport", "pigeon://u:geheim@h")) == 2
    [failed] = works.events
    assert (failed["event"], failed["level"], failed["exit_code"]) == ("command_failed", "error", 2)
    assert "'pigeon://u:***@h' is not of a known kind" in failed["error"]
    assert failed["message"] == failed["error"]


def test_the_log_of_a_relay(works: Works) -> None:
    """A relay logs its start, what is refused, and its stop."""
    key = Key("shop", "order-1")
    mail = WaitingMessage("mail-1", "out", Message("mail-1", b"x" * 20), key)
    works.ledger.handled(granted(works.ledger.claim(key)), deferred=[mail])
    queue = f"sqlite:///{works.folder}/queue.db?max_bytes=10"
    assert works.run(works.relay("--drain", "--transport", queue)) == 1
    assert [each["event"] for each in works.events] == [
        "relay_started",
        "deferred_set_aside",
        "relay_stopped",
    ]
    assert works.events[1]["message_id"] == "mail-1"
    assert works.events[-1]["set_aside"] == 1


# ---- The port ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_port_of_a_consumer(works: Works, port: Get, workers: str) -> None:
    """Both probes answer 200 while it works; its counters are there, added up over its workers."""
    works.publish(*map(str, range(40)))
    works.publish("bad", type_="fail")
    works.start(works.consume("--workers", workers, "--metrics-port", "0"))

    def shown(name: str) -> float | None:
        return sample(port("/metrics").text, f'{name}{{consumer="shop"}}')

    wait_until(lambda: shown("oncely_completed_total") == 40)
    wait_until(lambda: shown("oncely_exhausted_total") == 1)
    assert shown("oncely_failed_total") == 2
    text = port("/metrics").text
    assert sample(text, "oncely_deferred_lag_seconds") == 0
    assert 'idempotency_check_duration_seconds_count{provider="shop"}' in text
    wait_until(lambda: port("/ready") == (200, "ready\n"))
    assert port("/live") == (200, "live\n")
    assert port("/").status == 404


def test_what_the_dead_had_in_hand(works: Works, port: Get) -> None:
    """A worker that died has nothing in hand any more; what it counted stays."""
    (works.folder / "measured.py").write_text(MEASURED)
    works.publish("a")
    how = ("--log-format", "json", "--workers", "2", "--metrics-port", "0")
    works.start(["consume", "measured:consumer", *how])
    works.wait_for("message_handled")
    # Whoever has it is among those that are killed.
    workers = works.wait_for("worker_started", 2)
    works.publish("long", type_="slow")

    def shown(name: str) -> float | None:
        return sample(port("/metrics").text, name)

    wait_until(lambda: shown("oncely_messages_in_flight") == 1)
    for each in workers:
        os.kill(each["pid"], signal.SIGKILL)
    wait_until(lambda: shown("oncely_messages_in_flight") == 0)
    assert shown('oncely_messages_handled_total{type=""}') == 1


def test_metrics_of_a_relay(works: Works, port: Get) -> None:
    """What it has sent, what waits and for how long are on the port, and that it is ready."""
    key = Key("shop", "order-1")
    later = WaitingMessage("mail-2", "out", Message("mail-2"), key, delay_s=3_600)
    # Set aside first: that is for people to know, and keeps the relay from nothing.
    aside = WaitingMessage("mail-0", "events:", Message("mail-0"), key)
    mails = [aside, WaitingMessage("mail-1", "out", Message("mail-1"), key), later]
    works.ledger.handled(granted(works.ledger.claim(key)), deferred=mails)
    works.start(works.relay("--metrics-port", "0"))
    sent, refused = (
        f'oncely_deferred_{what}_total{{consumer="shop"}}' for what in ("sent", "refused")
    )
    wait_until(lambda: sample(port("/metrics").text, sent) == 1)
    wait_until(lambda: sample(port("/metrics").text, refused) == 1)
    assert sample(port("/metrics").text, "oncely_deferred_waiting") == 1
    assert port("/live").status == 200
    wait_until(lambda: port("/ready").status == 200)


def test_a_port_that_is_taken(works: Works) -> None:
    """It is a mistake of one line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert works.run(["consume", "works:consumer", f"--metrics-port={port}"]) == 2
    said = f"oncely: --metrics-port: 127.0.0.1:{port} cannot be opened (Address already"
    assert works.said.startswith(said)
    assert works.said.count("\n") == 1


def is_alive(pid: int) -> bool:
    """Whether there is such a process that is not just waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- How it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "number"), [("1", signal.SIGTERM), ("2", signal.SIGINT)])
def test_a_second_signal(works: Works, workers: str, number: signal.Signals) -> None:
    """It ends at once, in the midst of what runs, and its workers with it."""
    works.publish("long", type_="slow")
    process = works.start(works.consume("--workers", workers))
    wait_until(lambda: works.begun("long"))
    assert ended_by(process, number) == 128 + number
    pids = [each["pid"] for each in works.of("worker_started")]
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_second_signal_to_a_worker(works: Works) -> None:
    """Whoever stops all processes of a service stops workers twice: they end in good order."""
    works.publish("long", type_="wait")
    process = works.start(works.consume("--workers", "2"))
    started = works.wait_for("worker_started", 2)
    wait_until(lambda: works.begun("long"))
    process.terminate()
    for each in started:
        os.kill(each["pid"], signal.SIGTERM)
    (works.folder / "go").touch()
    assert process.wait(60) == 0
    assert works.of("consumer_stopped")[0]["handled"] == 1
