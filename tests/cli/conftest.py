"""The command in this process or one of its own; a folder with a pipeline file; a ledger."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.records import granted

from oncely import Consumer, Key, Ledger, Message, open_ledger
from oncely.core.waiting import WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import PutBack
from oncely.transports.store_transport import StoreTransport

HANDLERS = """
import json, os, time
from pathlib import Path

LOG = Path(__file__).with_name("effects.jsonl")
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))

def handle(message):
    line = {"id": message.id, "fence": message.claim.fence, "pid": os.getpid()}
    log = os.open(LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, (json.dumps(line) + "\\n").encode())
    os.close(log)
    time.sleep(PAUSE_S)

def send(message):
    handle(message)
    message.send("orders", {"for": message.id})

def fail(message):
    raise ValueError("never")

def two(message, session):
    raise ValueError("not called")

not_callable = 3
"""

SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For Java: compiling hot code well, or collecting garbage by threads, would take longer than it
saves."""

TABLES = {
    "pipeline": {
        "name": "test",
        "consumer": "tests",
        "ledger": "sqlite:///out/ledger.db",
        "handler": "handlers:handle",
        "checkpoint": "out/checkpoint",
        "quarantine": "out/quarantine",
    },
    "source": {"format": "json", "path": "in", "schema": "id STRING, body STRING"},
    "message": {"id": "id", "body": "body"},
    "policy": {},
    "spark": {
        "spark.driver.extraJavaOptions": SHORT_RUN,
    },
}

REAL_INPUT = os.environ.get("ONCELY_REAL_INPUT")
with_real_input = pytest.mark.skipif(
    not REAL_INPUT, reason="set ONCELY_REAL_INPUT to a file of GitHub deliveries"
)

Tables = dict[str, dict[str, Any]]
Run = subprocess.Popen[str]


class Ran(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


def ran_here(*arguments: str) -> Ran:
    """Run the command in this process."""
    from oncely.cli import main as run_main

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            code = run_main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def cells(out: str) -> list[list[str]]:
    """The cells of a table: what stands two blanks or more apart."""
    lines = [line for line in out.splitlines() if line.strip() and "─" not in line]
    return [[part.strip() for part in line.split("  ") if part.strip()] for line in lines]


def told(err: str) -> list[str]:
    """What was said on stderr besides progress, and that it all began and ended."""
    begun = r"[0-9TZ:.-]+ INFO .* event=(consumer|worker|relay|bridge)_(started|stopped)\b"
    ordinary = re.compile(rf"received |sent |stored |{begun}")
    return [line for line in err.splitlines() if not ordinary.match(line)]


class Got(NamedTuple):
    status: int
    text: str


def got(url: str) -> Got:
    """What it answers, whatever its status."""
    try:
        with urlopen(url, timeout=60) as answer:
            return Got(answer.status, answer.read().decode())
    except HTTPError as refused:
        with refused:
            return Got(refused.code, refused.read().decode())


class Project:
    """A pipeline's folder."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder = folder
        self._request = request
        self.started = ExitStack()
        self.tables: Tables = {name: dict(table) for name, table in TABLES.items()}
        (folder / "in").mkdir()
        (folder / "handlers.py").write_text(HANDLERS)

    @property
    def file(self) -> Path:
        return self.folder / "pipeline.toml"

    def save(self) -> Path:
        """Write the pipeline file from `tables`."""
        lines = []
        for name, table in self.tables.items():
            lines.append(f"[{name}]")
            # TOML's strings, numbers, lists and booleans are written as JSON's.
            lines += [f'"{key}" = {json.dumps(value)}' for key, value in table.items()]
        self.file.write_text("\n".join(lines))
        return self.file

    def put(self, name: str, ids: list[str]) -> None:
        """A file of messages in the source's folder."""
        rows = [json.dumps({"id": id_, "body": "{}"}) for id_ in ids]
        (self.folder / "in" / name).write_text("\n".join(rows))

    def read_real_input(self) -> dict[str, Any]:
        """Let it read the real deliveries; return what was found in them independently."""
        source = Path(str(REAL_INPUT))
        self.tables["source"] = {"format": "json", "path": str(source)}
        self.tables["message"] = {"id": "delivery", "body": "to_json(payload)"}
        name = source.name.partition(".")[0]
        expected: dict[str, Any] = json.loads(source.with_name(f"{name}.expected.json").read_text())
        return expected

    def effects(self) -> Counter[str]:
        log = self.folder / "effects.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return Counter(json.loads(line)["id"] for line in lines)

    def let_waiting_be_due(self) -> None:
        """Let the next try of what waits in the ledger begin whenever somebody looks."""
        failed = "UPDATE processed_messages SET lease_until = 0 WHERE status = 'failed'"
        with closing(sqlite3.connect(self.folder / "out" / "ledger.db")) as connection, connection:
            connection.execute("UPDATE waiting_messages SET due_at = 0, held_until = 0")
            connection.execute(failed)

    def start(self, *arguments: str, **env: str) -> Run:
        """Start the command, in a process group that the end of the test kills."""
        run = Run(
            [sys.executable, "-m", "oncely", "pipeline", "run", str(self.save()), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **env},
        )
        self.started.enter_context(run)
        self.started.callback(_end, run)
        return run

    def run(self, *arguments: str) -> dict[str, Any]:
        """Run it to its end, in this process and on its Spark; return what `--json` prints."""
        self._request.getfixturevalue("spark")
        ran = ran_here("pipeline", "run", str(self.save()), "--json", *arguments)
        assert ran.code in {0, 1}, ran.err
        report: dict[str, Any] = json.loads(ran.out)
        assert report["received"] == self.settled(report)
        return report

    def outcome(self, *arguments: str) -> tuple[int, str]:
        """Run it, on the Spark that there is; its exit code, and what it said on stderr."""
        ran = ran_here("pipeline", "run", str(self.save()), *arguments)
        return ran.code, ran.err

    @staticmethod
    def settled(report: dict[str, Any]) -> int:
        """What became of the deliveries of a report, added up."""
        parts = [*report["duplicates"].values(), *report["quarantined"].values()]
        parts.append(report["waiting"])
        return int(report["handled"] + report["failed"] + report["in_doubt"] + sum(parts))


def _end(run: Run) -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)


@pytest.fixture
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Project]:
    """A pipeline's folder, its source still empty."""
    project = Project(tmp_path, request)
    with project.started:
        yield project


Command = Callable[..., Ran]


@pytest.fixture
def command() -> Command:
    return ran_here


class Keyboard(StringIO):
    def isatty(self) -> bool:
        return True


Answer = Callable[[str], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Somebody at a terminal answers so."""
    return lambda text: monkeypatch.setattr(sys, "stdin", Keyboard(text))


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no terminal."""
    monkeypatch.setattr(sys, "stdin", StringIO())


InProcess = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def in_process() -> InProcess:
    """Run the command in a process of its own; settings are those of subprocess.run."""

    def run(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **settings}
        return subprocess.run(
            [sys.executable, "-m", "oncely", *arguments],
            check=False,
            text=True,
            **settings,
        )

    return run


class OnFile:
    """A ledger in a file, and its records made older than they are."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"
        self.ledger: Ledger = open_ledger(self.url)
        self.ledger.migrate()

    def fail(
        self, consumer: str, message_id: str, error: str = "no", *, final: bool = False
    ) -> None:
        """A record that has failed."""
        self.ledger.fail(granted(self.ledger.claim(Key(consumer, message_id))), error, final)

    def complete(self, consumer: str, message_id: str, result: Any = None) -> None:
        self.ledger.complete(granted(self.ledger.claim(Key(consumer, message_id))), result)

    def claim(self, consumer: str, message_id: str) -> None:
        granted(self.ledger.claim(Key(consumer, message_id)))

    def age(self, seconds: float) -> None:
        """Let all that is there have happened that much earlier."""
        times = ("first_processed_at", "last_processed_at", "lease_until")
        earlier = ", ".join(f"{name} = {name} - {seconds}" for name in times)
        with closing(sqlite3.connect(self.file)) as connection, connection:
            connection.execute(f"UPDATE processed_messages SET {earlier}")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFile]:
    """A ledger without records, named by ONCELY_LEDGER; a terminal of 120 columns."""
    at = OnFile(tmp_path / "ledger.db")
    monkeypatch.setenv("ONCELY_LEDGER", at.url)
    monkeypatch.setenv("COLUMNS", "120")
    yield at
    at.ledger.close()


@pytest.fixture
def sending(at: OnFile) -> OnFile:
    """A record that is handled: one message of its own waits, another was set aside."""
    claim = granted(at.ledger.claim(Key("shop", "order-9")))
    at.ledger.keep_step(claim, "charge", {"receipt": "é" + "y" * 400})
    at.ledger.keep_step(claim, "log", None)
    receipt = Message("receipt-1")
    messages = [WaitingMessage("receipt-1", to, receipt, claim.key) for to in ("mails", "texts")]
    at.ledger.handled(claim, None, messages)
    [refused] = at.ledger.mailbox.take(1, "1s")
    at.ledger.mailbox.put_back([PutBack(refused, "too large: " + "x" * 400, None)])
    return at


@pytest.fixture
def filled(at: OnFile) -> OnFile:
    """Records of two consumers in all states, last seen three hours and twelve minutes ago."""
    at.claim("billing", "doubtful")
    at.complete("billing", "order-1", {"receipt": 7})
    at.ledger.claim(Key("billing", "order-1"))
    at.fail("billing", "order-2", "Timeout: the bank did not answer")
    at.fail("sms", "order-1", "Refused: no such number", final=True)
    at.ledger.handled(granted(at.ledger.claim(Key("sms", "to-send"))))
    at.age(3 * 3_600 + 12 * 60 + 5)
    at.claim("sms", "live")
    return at


class Shop:
    """A consumer "shop" of the queue "orders", over a ledger that others look into."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.transport = StoreTransport(MemoryStore())

    def consumer(self) -> Consumer:
        """The consumer, which tries once."""
        return Consumer(self.transport, "orders").idempotent(self.ledger, "shop").tries(1)

    def fail(self, *messages: Message, error: str = "no such customer") -> list[int]:
        """Let these become dead letters, one after another; return the numbers of all."""

        def fail(_: Message) -> None:
            raise ValueError(error)

        for message in messages:
            self.transport.publish("orders", [message])
            self.consumer().consume(fail, drain=True)
        return [letter.id for letter in self.ledger.dead()]

    def wait(self, message: Message, delay: str = "25s", error: str = "away") -> None:
        """Let this one fail, and wait to be tried again."""

        def fail(_: Message) -> None:
            raise OSError(error)

        consumer = self.consumer().tries(3).backoff(delay)
        self.transport.publish("orders", [message])
        consumer.catch(lambda _, __: consumer.stop()).consume(fail)

    def handled(self) -> list[Message]:
        """What the consumer handles when it runs once more."""
        messages: list[Message] = []
        self.consumer().consume(messages.append, drain=True)
        return messages


@pytest.fixture
def shop(at: OnFile) -> Shop:
    """A consumer over the ledger that ONCELY_LEDGER names."""
    return Shop(at.ledger)
