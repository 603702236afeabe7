"""`oncely bridge`: what it moves, what it says, and how it is stopped."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.conftest import Command, OnFile, told
from tests.conditions import wait_until

from oncely import Message, open_transport, publish
from oncely.cli import terminal
from oncely.core.waiting import queue_named


@pytest.fixture
def broker(tmp_path: Path) -> str:
    """The URL of a queue `orders` with two messages."""
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    publish(url, "orders", [Message("a"), Message("b")])
    return url


def test_what_it_moves(
    at: OnFile, broker: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the ledger's queue of the same name or of another one; or into files, whatever ledger
    the environment names.
    """
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    monkeypatch.setenv("BROKER", broker)
    drain = ("bridge", "env:BROKER", "--queue", "orders", "--drain")
    code, out, err = command(*drain)
    assert (code, out.split(), "\nstored 2\n" in err) == (0, ["stored", "2"], True)
    publish(broker, "orders", Message("c"))
    assert json.loads(command(*drain, "--into", "bills", "--json").out) == {"stored": 1}
    publish(broker, "orders", Message("d"))
    folder = at.file.parent / "out"
    code, _, err = command(*drain, "--files", str(folder), "--log-format", "json")
    told = [json.loads(line)["event"] for line in err.splitlines()]
    # Where the machine is busy, it also says that its activity was not stored.
    events = [event for event in told if event.startswith("bridge_")]
    assert (code, events) == (0, ["bridge_started", "bridge_stopped"])
    assert [json.loads(file.read_text())["id"] for file in folder.iterdir()] == ["d"]
    counts = {name: each.waiting for name, each in at.ledger.mailbox.backlogs().items()}
    assert counts == {queue_named("orders"): 2, queue_named("bills"): 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(at: OnFile, broker: str, number: signal.Signals) -> None:
    """A signal ends it in good order: it says what it did, and nothing is lost."""
    with subprocess.Popen(
        [sys.executable, "-m", "oncely", "bridge", broker, "--queue", "orders", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        wait_until(at.ledger.mailbox.backlogs, programs=[process])
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, json.loads(out), told(err)) == (0, {"stored": 2}, [])
    with closing(open_transport(broker)) as transport:
        assert transport.is_drained("orders")


def test_a_broker_that_is_away(at: OnFile, command: Command) -> None:
    """At the start that is an error, in one line and without the password."""
    ran = command("bridge", "amqp://u:geheim@127.0.0.1:1/", "--queue", "orders")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.splitlines()[-1].startswith("oncely: RabbitMQ: ")
    assert "geheim" not in ran.err
