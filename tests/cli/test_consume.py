"""`oncely consume`: one process and several, stopped, killed, and mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command, InProcess, told
from tests.conditions import wait_until
from tests.records import granted

from oncely import Key, Message, State, open_ledger, open_transport
from oncely.cli import terminal
from oncely.consumer.report import ConsumerReport

SHOP = """
import json, os, signal, time
from pathlib import Path
import oncely

FOLDER = Path(__file__).parent
ledger = oncely.open_ledger(f"sqlite:///{FOLDER}/ledger.db")
hold = os.environ["HOLD"]
consumer = (
    oncely.Consumer(f"sqlite:///{FOLDER}/queue.db?visibility={hold}", queue="orders")
    .idempotent(ledger, "shop", policy=oncely.Policy(lease=hold))
)
never_twice = (
    oncely.Consumer(f"sqlite:///{FOLDER}/queue.db", queue="orders")
    .idempotent(ledger, "once", policy=oncely.at_most_once())
    .catch(lambda error, message: print("catch", type(error).__name__))
    .failed(lambda error, message: print("failed", type(error).__name__))
)
unhandled = oncely.Consumer(f"sqlite:///{FOLDER}/queue.db", queue="orders")
in_memory = oncely.Consumer("memory://geheim", queue="orders")
forgetful = (
    oncely.Consumer(f"sqlite:///{FOLDER}/queue.db", queue="orders")
    .idempotent(oncely.open_ledger("memory://"), "shop")
)
nothing = {}

@never_twice.handler
@in_memory.handler
@consumer.handler
def handle(message):
    log("begun", message)
    match message.type:
        case "print":
            print("said by the handler")
        case "fail":
            raise oncely.Reject("no such customer")
        case "wait":
            while not (FOLDER / "go").exists():
                time.sleep(0.01)
        case "kill" if not (FOLDER / "killed").exists():
            (FOLDER / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    log("done", message)

def log(what, message):
    line = json.dumps({"what": what, "id": message.id, "pid": os.getpid()}) + "\\n"
    file = os.open(FOLDER / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
"""

NOTHING: dict[str, Any] = {"errors": [], **ConsumerReport().counts()}

Start = Callable[..., subprocess.Popen[str]]


class Shop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shop.py").write_text(SHOP)
        self.ledger = open_ledger(f"sqlite:///{folder}/ledger.db")
        self.ledger.migrate()
        self.transport = open_transport(f"sqlite:///{folder}/queue.db")

    def publish(self, *ids: str, type_: str = "") -> None:
        self.transport.publish("orders", [Message(id_, type=type_) for id_ in ids])

    def log(self, what: str) -> Counter[str]:
        """How often handlers came so far, with which message."""
        return Counter(line["id"] for line in self.lines if line["what"] == what)

    @property
    def pids(self) -> set[int]:
        return {line["pid"] for line in self.lines}

    @property
    def lines(self) -> list[dict[str, Any]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def completed(self) -> int:
        return self.ledger.counts().get(("shop", State.COMPLETED), 0)

    def go(self) -> None:
        """Let those handlers end that wait for it."""
        (self.folder / "go").touch()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop in the current folder, no trace of which stays in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HOLD", "60s")
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 1e9)
    shop = Shop(tmp_path)
    with closing(shop.ledger), closing(shop.transport):
        yield shop
    if (module := sys.modules.pop("shop", None)) is not None:
        module.ledger.close()


@pytest.fixture
def start(shop: Shop) -> Iterator[Start]:
    """Start the command on the shop's consumer, in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "oncely", "consume", "shop:consumer", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    shop.go()
    for process in started:
        process.kill()
        process.communicate()


# ---- One process -------------------------------------------------------------------------------


def test_drain(shop: Shop, command: Command) -> None:
    """What waits is handled, each message once, and a table says what was done."""
    shop.publish("a", "b", "a")
    code, out, err = command("consume", "shop:consumer", "--drain")
    assert (code, told(err)) == (0, [])
    counts = "received 3 handled 2 duplicates 1 failed 0 retried 0 in doubt 0 dead lettered 0"
    assert " ".join(out.split()) == f"{counts} deferred sent 0"
    assert shop.log("done") == {"a": 1, "b": 1}


@pytest.mark.parametrize("consumer", ["consumer", "never_twice"])
def test_failures(shop: Shop, command: Command, consumer: str) -> None:
    """One object on stdout, what handlers and listeners print on stderr; the code tells of dead
    letters, also of what may not run again.
    """
    shop.publish("a", type_="print")
    shop.publish("b", type_="fail")
    code, out, err = command("consume", f"shop:{consumer}", "--drain", "--json")
    assert code == 1
    assert told(err)[0] == "said by the handler"
    errors = [{"text": "Reject: no such customer", "count": 1}]
    report = {"received": 2, "handled": 1, "failed": 1, "dead_lettered": 1, "errors": errors}
    assert json.loads(out) == NOTHING | report
    assert out.count("\n") == 1
    assert ("failed Reject" in err, "catch" in err) == (consumer == "never_twice", False)


def test_progress(shop: Shop, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it works it says on stderr where it stands."""
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    shop.publish("a")
    ran = command("consume", "shop:consumer", "--drain")
    assert "\nreceived 1  handled 1  duplicates 0  failed 0" in ran.err


def test_memory_alone(shop: Shop, command: Command) -> None:
    """A queue in memory is drained; that nobody else can fill it is told, and that no ledger is
    there.
    """
    code, out, err = command("consume", "shop:in_memory", "--drain")
    assert (code, out.split()[:2]) == (0, ["received", "0"])
    line, other = told(err)
    assert other.endswith("event=no_ledger")
    said = "the queue is in memory: no other process can publish to it event=queue_in_memory"
    assert line.endswith(said)


@pytest.mark.parametrize(("workers", "number"), [("1", signal.SIGINT), ("2", signal.SIGTERM)])
def test_stopped(shop: Shop, start: Start, workers: str, number: signal.Signals) -> None:
    """A signal ends it in good order, and with 0, whatever has failed: what runs comes to its end,
    and the rest stays.
    """
    shop.publish("bad", type_="fail")
    shop.publish("a", type_="wait")
    process = start("--workers", workers)
    wait_until(lambda: shop.log("begun").keys() >= {"a", "bad"})
    process.send_signal(number)
    shop.publish("b")
    shop.go()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert (report["handled"], report["failed"]) == (sum(shop.log("done").values()), 1)
    assert shop.log("done")["a"] == 1
    assert shop.completed() == sum(shop.log("done").values())


# ---- Several -----------------------------------------------------------------------------------


def test_workers(shop: Shop, start: Start) -> None:
    """Several processes work on one queue; what they did is added up, in one object on stdout."""
    # More than one of them takes ahead.
    shop.publish(*map(str, range(19)), type_="wait")
    shop.publish("19", type_="print")
    process = start("--workers", "2", "--drain")
    wait_until(lambda: len(shop.pids) == 2)
    assert process.pid not in shop.pids
    shop.go()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, told(err)) == (0, ["said by the handler"])
    assert json.loads(out) == NOTHING | {"received": 20, "handled": 20}
    assert set(shop.log("done").values()) == {1}
    assert shop.completed() == 20


@pytest.mark.in_turn("processes are killed")
def test_a_killed_worker_is_replaced(
    shop: Shop, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker dies in the middle of a message: another comes, and every message is handled."""
    monkeypatch.setenv("HOLD", "2s")
    shop.publish(*map(str, range(20)))
    shop.publish("deadly", type_="kill")
    process = start("--workers", "2", "--drain")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err.count("worker_died worker=") == 1
    assert " died of signal 9 (Killed); it is started again in 0." in err
    # More than once where the machine stalls for longer than its lease.
    assert shop.log("begun")["deadly"] >= 2
    assert set(shop.log("done")) == {"deadly", *map(str, range(20))}
    assert shop.completed() == 21


# ---- Mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shop"], "'shop' names no consumer; write \"module:consumer\""),
        (["shop:"], "'shop:' names no consumer"),
        ([":consumer"], "':consumer' names no consumer"),
        (["nowhere:consumer"], "there is no module 'nowhere', neither in "),
        (["shop.orders:consumer"], "there is no module 'shop.orders', neither in "),
        (["needy:consumer"], "needy cannot be imported: No module named 'not_there' ("),
        (["needy:consumer"], "needy.py, line 2)"),
        (["broken:consumer"], "broken cannot be imported: ConfigError: ledger: 'pigeon://u:***@h'"),
        (["broken:consumer"], "broken.py, line 3)"),
        (["leaving:consumer"], "leaving cannot be imported: SystemExit: 3 ("),
        (["unread:consumer"], "unread cannot be imported: SyntaxError: "),
        (["unread:consumer"], "unread.py, line 2)"),
        (["shop:worker"], "shop has no 'worker'; did you mean shop:consumer?"),
        (["shop:nothing"], "shop:nothing is of type dict, not an oncely.Consumer; did you mean"),
        (["shop:in_memory", "--workers", "2"], '"memory://" is seen by one process only'),
        (["shop:forgetful", "--workers", "2"], 'ledger: "memory://" is seen by one process only'),
        (["shop:unhandled"], "nothing handles the messages"),
        (["shop:consumer", "--workers", "0"], "--workers: '0' is not a whole number from 1"),
        ([], "missing argument 'module:consumer'; see: oncely consume --help"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_mistake_is_one_line(
    shop: Shop, command: Command, arguments: list[str], said: str
) -> None:
    """Exit code 2, and a line that says what is wrong and where; nothing on stdout."""
    (shop.folder / "needy.py").write_text("import json\nimport not_there\n")
    (shop.folder / "broken.py").write_text(
        "import oncely\n\noncely.open_ledger('pigeon://u:geheim@h')\n"
    )
    (shop.folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    (shop.folder / "unread.py").write_text("import json\ndef (:\n")
    code, out, err = command("consume", *arguments)
    assert (code, out) == (2, "")
    [line] = told(err)
    assert line.startswith("oncely: ")
    assert said in line
    assert "geheim" not in err


def test_the_current_folder(shop: Shop, tmp_path: Path) -> None:
    """A module is found in the current folder, by the installed program too."""
    oncely = Path(sys.executable).with_name("oncely")
    ran = subprocess.run(
        [oncely, "consume", "shop:consumer", "--drain", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert (ran.returncode, json.loads(ran.stdout)) == (0, NOTHING)


def test_no_table(shop: Shop, command: Command) -> None:
    """A ledger without its table is told in a line, which says what to type, and no traceback."""
    (shop.folder / "ledger.db").unlink()
    shop.publish("a")
    ran = command("consume", "shop:consumer", "--drain")
    assert (ran.code, ran.out) == (1, "")
    assert "Traceback" not in ran.err
    assert "migrate" in told(ran.err)[-1]


# ---- In another environment --------------------------------------------------------------------


def test_elsewhere(shop: Shop, in_process: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ledger and --transport replace the module's in every worker, and leave them alone."""
    there = f"sqlite:///{shop.folder}/there.db"
    monkeypatch.setenv("THERE", there)
    shop.publish("here")
    with closing(open_ledger(there)) as ledger, closing(open_transport(there)) as transport:
        ledger.migrate()
        shop.ledger.complete(granted(shop.ledger.claim(Key("shop", "a"))))
        ledger.complete(granted(ledger.claim(Key("shop", "b"))))
        transport.publish("orders", [Message("a"), Message("b")])
        how = "--drain --json --workers 2 --ledger env:THERE --transport env:THERE"
        ran = in_process("consume", "shop:consumer", *how.split())
        assert (ran.returncode, told(ran.stderr)) == (0, [])
        assert json.loads(ran.stdout) == NOTHING | {"received": 2, "handled": 1, "duplicates": 1}
        assert ledger.counts() == {("shop", State.COMPLETED): 2}
    assert shop.completed() == 1


def test_not_unasked(shop: Shop, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the environment for the other commands replaces nothing."""
    for name in ("ONCELY_LEDGER", "ONCELY_TRANSPORT"):
        monkeypatch.setenv(name, f"sqlite:///{shop.folder}/there.db")
    shop.publish("a")
    assert command("consume", "shop:consumer", "--drain").code == 0
    assert shop.completed() == 1


@pytest.mark.parametrize(
    ("consumer", "said"),
    [
        ("shop:unhandled", "ledger: there is none to replace; add .idempotent(ledger, name)"),
        ("bank:consumer", "ledger: a transactional consumer keeps its records where its trans"),
    ],
)
def test_nowhere_else(shop: Shop, command: Command, consumer: str, said: str) -> None:
    """A ledger that cannot be used instead is told in one line, and nothing is taken."""
    (shop.folder / "bank.py").write_text(
        "import shop, sqlalchemy\n"
        "consumer = shop.consumer.transactional(sqlalchemy.create_engine('sqlite://'))\n"
    )
    shop.publish("a")
    code, out, err = command("consume", consumer, "--drain", "--ledger", "sqlite:///ledger.db")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not shop.log("begun")
    sys.modules.pop("bank", None)
