"""`oncely relay`: what it sends, what it says, how it is stopped, and mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command, InProcess, OnFile, told
from tests.records import granted

from oncely import Key, Message, State, open_transport
from oncely.cli import terminal
from oncely.core.waiting import WaitingMessage

Defer = Callable[..., None]


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a queue that takes bodies of ten bytes, named by ONCELY_TRANSPORT."""
    url = f"sqlite:///{tmp_path / 'queue.db'}?max_bytes=10"
    monkeypatch.setenv("ONCELY_TRANSPORT", url)
    with closing(open_transport(url)) as there:
        there.subscribe("out", [])
    return url


@pytest.fixture
def defer(at: OnFile) -> Defer:
    """Let a message be handled that defers one for the queue."""

    def handle(id_: str, body: bytes = b"body", delay_s: float = 0.0) -> None:
        key = Key("shop", id_)
        deferred = WaitingMessage(id_, "out", Message(id_, body), key, delay_s=delay_s)
        at.ledger.handled(granted(at.ledger.claim(key)), deferred=[deferred])

    return handle


def arrived(transport: str) -> list[str]:
    with closing(open_transport(transport)) as queue:
        return [delivery.message.id for delivery in queue.receive("out", 100, 0)]


NOTHING: dict[str, Any] = {"sent": 0, "refused": 0, "set_aside": 0, "waiting": 0, "errors": []}
TOO_LONG = {"errors": [{"text": "out: body of 13 bytes is over the limit of 10", "count": 1}]}


# ---- What is sent, and said --------------------------------------------------------------------


def test_drain(at: OnFile, transport: str, defer: Defer, command: Command) -> None:
    """What can be sent is sent, its messages are completed; the code says what was refused."""
    defer("a")
    defer("b")
    defer("later", delay_s=3_600)
    code, out, err = command("relay", "--drain")
    assert (code, told(err)) == (0, [])
    counts = [line.rsplit(maxsplit=1) for line in out.splitlines()]
    assert counts == [["sent", "2"], ["refused", "0"], ["set aside", "0"], ["waiting", "1"]]
    assert arrived(transport) == ["a", "b"]
    assert at.ledger.counts() == {("shop", State.COMPLETED): 2, ("shop", State.HANDLED): 1}
    defer("c", b"much too long")
    defer("d", b"even much longer")
    code, out, _ = command("relay", "--drain")
    told_last = out.splitlines()[-1].rsplit(maxsplit=1)
    assert (code, told_last) == (1, ["out: body of 13 bytes is over the limit of 10", "2"])
    defer("e", b"much too long")
    code, out, _ = command("relay", "--drain", "--json")
    assert (code, out.count("\n")) == (1, 1)
    assert json.loads(out) == NOTHING | {"set_aside": 1, "waiting": 1} | TOO_LONG


def test_queues_are_made_where_it_is_asked_for(
    transport: str, defer: Defer, command: Command
) -> None:
    """Else a message for a queue that is missing is set aside."""
    nowhere = transport.replace("queue.db", "another.db")
    assert nowhere != transport
    defer("a")
    ran = command("relay", "--drain", "--json", "--transport", nowhere, "--create-queues")
    assert json.loads(ran.out) == NOTHING | {"sent": 1}
    assert arrived(nowhere) == ["a"]
    defer("b")
    third = transport.replace("queue.db", "third.db")
    ran = command("relay", "--drain", "--json", "--transport", third)
    refused = [{"text": "out: 'out': no queue takes it", "count": 1}]
    assert json.loads(ran.out) == NOTHING | {"set_aside": 1, "errors": refused}


def test_set_aside_and_retried(at: OnFile, transport: str, defer: Defer, command: Command) -> None:
    """What was refused for good is a failure, and is sent when people let it."""
    defer("b", b"much too long")
    code, out, _ = command("relay", "--drain", "--json", "--tries", "1")
    assert (code, json.loads(out)["set_aside"]) == (1, 1)
    assert command("relay", "--drain").code == 0
    wide = transport.partition("?")[0]
    again = ("relay", "--drain", "--retry-set-aside", "--json", "--by", "ann", "--why", "wide now")
    code, out, err = command(*again, "--transport", wide)
    assert (code, told(err)[-1]) == (0, "set-aside messages to retry: 1")
    assert json.loads(out) == NOTHING | {"sent": 1}
    assert command(*again, "--transport", wide).code == 0
    [entry] = at.ledger.operations.audit()
    assert (entry.by, entry.action, entry.changed) == ("ann", "unsent_retried", 1)
    assert (entry.consumer, entry.message_id, entry.why) == ("", "", "wide now")


def test_progress(
    transport: str, defer: Defer, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it works it says on stderr what is sent, what waits, and for how long."""
    monkeypatch.setattr(terminal, "_LINE_EVERY_S", 0.0)
    defer("a")
    defer("later", delay_s=3_600)
    ran = command("relay", "--drain", "--json")
    assert "\nsent 1  refused 0  set aside 0  waiting 1  lag 0 s\n" in ran.err


def test_secrets(
    transport: str,
    defer: Defer,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transport may be in a variable or in a file."""
    monkeypatch.setenv("QUEUE", transport)
    (tmp_path / "secret").write_text(f"{transport}\n")
    for number, location in enumerate(["env:QUEUE", f"file:{tmp_path / 'secret'}"]):
        defer(str(number))
        assert command("relay", "--drain", "--transport", location).code == 0
    assert arrived(transport) == ["0", "1"]


# ---- Stopping ----------------------------------------------------------------------------------


@pytest.fixture
def started(at: OnFile, transport: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "oncely", "relay", "--json", "--poll", "20ms"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(
    at: OnFile,
    transport: str,
    defer: Defer,
    started: subprocess.Popen[str],
    number: signal.Signals,
) -> None:
    """A signal ends it in good order: it says what it did, and what is published is marked."""
    for sent in range(20):
        defer(str(sent))
    with closing(open_transport(transport)) as queue:
        assert queue.receive("out", 1, wait_s=60)
    started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, told(err)) == (0, [])
    published = len(arrived(transport))
    left = 20 - published
    assert json.loads(out) == NOTHING | {"sent": published, "waiting": left}
    assert at.ledger.mailbox.backlog().waiting == left


# ---- Mistakes ----------------------------------------------------------------------------------


def test_redis_defers_nothing(transport: str, command: Command, redis_url: str) -> None:
    """A ledger that cannot defer messages is told in one line."""
    code, out, err = command("relay", "--ledger", redis_url)
    assert (code, out) == (2, "")
    [line] = told(err)
    assert "Redis has no transactions, so no message waits" in line


def test_the_broker_is_away(
    at: OnFile, defer: Defer, in_process: InProcess, tmp_path: Path
) -> None:
    """To drain into a broker that is away is a failure, in one line; nothing is marked."""
    defer("a")
    (tmp_path / "queue.db").write_bytes(b"no database " * 1_000)
    ran = in_process("relay", "--drain", "--transport", f"sqlite:///{tmp_path / 'queue.db'}")
    assert ran.returncode == 3
    [line] = told(ran.stderr)
    assert line.startswith("oncely: ")
    assert at.ledger.mailbox.backlog().waiting == 1
