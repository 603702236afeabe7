"""`oncely bridge`: what it moves, what it says, how it is stopped, and mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.conftest import Command, OnFile, told
from tests.conditions import wait_until

from oncely import Consumer, Message, open_transport, publish
from oncely.cli import terminal


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a queue `orders` with two messages, named by BROKER."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    monkeypatch.setenv("BROKER", url)
    publish(url, "orders", [Message("a"), Message("b")])
    return url


def test_into_a_ledger(
    at: OnFile, broker: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages are in the ledger's queue, of the same name or another one, for a consumer."""
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    code, out, err = command("bridge", "env:BROKER", "--queue", "orders", "--drain")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [["received", "2"], ["stored", "2"]]
    assert "\nreceived 2  stored 2\n" in err
    publish(broker, "orders", Message("c"))
    arguments = ("--queue", "orders", "--into", "bills", "--batch", "1", "--drain", "--json")
    code, out, _ = command("bridge", broker, *arguments)
    assert (code, json.loads(out)) == (0, {"received": 1, "stored": 1})
    handled: list[str] = []
    for queue in ("orders", "bills"):
        consumer = Consumer(at.url, queue).idempotent(at.ledger, "shop")
        consumer.consume(lambda message: handled.append(message.id), drain=True)
    assert handled == ["a", "b", "c"]


def test_into_files(at: OnFile, broker: str, command: Command, tmp_path: Path) -> None:
    """Whatever ledger the environment names, with --files it is not used."""
    folder = tmp_path / "out"
    arguments = ("--queue", "orders", "--files", str(folder), "--drain", "--log-format", "json")
    code, out, err = command("bridge", broker, *arguments)
    assert (code, out.split()) == (0, ["received", "2", "stored", "2"])
    [file] = folder.iterdir()
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == ["a", "b"]
    events = [json.loads(line) for line in err.splitlines()]
    assert [event["event"] for event in events] == ["bridge_started", "bridge_stopped"]
    assert at.ledger.mailbox.backlogs() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(at: OnFile, broker: str, number: signal.Signals) -> None:
    """A signal ends it in good order: it says what it did, and nothing is lost."""
    with subprocess.Popen(
        [sys.executable, "-m", "oncely", "bridge", broker, "--queue", "orders", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as bridge:
        wait_until(at.ledger.mailbox.backlogs, programs=[bridge])
        bridge.send_signal(number)
        out, err = bridge.communicate(timeout=60)
    assert (bridge.returncode, told(err)) == (0, [])
    assert json.loads(out) == {"received": 2, "stored": 2}
    with closing(open_transport(broker)) as transport:
        assert transport.is_drained("orders")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["env:BROKER"], 2, "missing option '--queue'"),
        (["env:NOWHERE"], 2, "source: the environment variable NOWHERE is not set"),
        (["memory://geheim"], 2, '"memory://" is seen by one process only'),
        (["pigeon://u:geheim@h"], 2, "source: 'pigeon://u:***@h' is not of a known kind; write "),
        (["env:BROKER", "--files", "x", "--into", "y"], 2, "into the folder alone; drop --into"),
        (["env:BROKER", "--files", "x", "--ledger", "y"], 2, "alone; drop --ledger"),
        (["env:BROKER", "--files", "/dev/null/x"], 2, "files: '/dev/null/x' cannot be made"),
        (["env:BROKER", "--ledger", ""], 2, "no ledger is named; add --ledger"),
        (["env:BROKER", "--batch", "0"], 2, "--batch: '0' is not a whole number from 1"),
        (["amqp://u:geheim@127.0.0.1:1/", "--files", "x"], 1, "RabbitMQ: "),
    ],
)
def test_a_mistake_is_one_line(
    broker: str,
    at: OnFile,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    code: int,
    said: str,
) -> None:
    """It says what is wrong, and shows no secret; a broker that is away at the start is one."""
    monkeypatch.chdir(at.file.parent)
    queue = [] if "queue" in said else ["--queue", "orders"]
    ran = command("bridge", *arguments, *queue)
    assert (ran.code, ran.out) == (code, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith("oncely: ")
    assert said in last
    assert "geheim" not in ran.err
    with closing(open_transport(broker)) as transport:
        assert len(transport.receive("orders", 9, 0)) == 2
