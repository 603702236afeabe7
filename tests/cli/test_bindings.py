"""`oncely bindings`: what an older version of a consumer has left, on RabbitMQ and in SQL."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pika
import pytest

from oncely import Message, open_ledger, open_transport
from oncely.cli import progress
from oncely.core.errors import PublishRefused, StoreUnavailable

if TYPE_CHECKING:
    from tests.cli.conftest import Command

VERSION = """
import os
import oncely

ledger = oncely.open_ledger(os.environ["SHOP_LEDGER"]) if os.environ["SHOP_LEDGER"] else None
consumer = oncely.Consumer(os.environ["SHOP_QUEUE"], queue="orders").events({events})
if ledger is not None:
    consumer.idempotent(ledger, "shop")

@consumer.handler
def handle(message):
    print("handled", message.type)
"""
VERSIONS = {
    "old": '"order.placed", "order.cancelled"',
    "new": '"order.placed", "order.returned"',
    "everything": "",
}
PLACED, CANCELLED, RETURNED = (f"order.{word}" for word in ("placed", "cancelled", "returned"))


class Service:
    """The versions of a consumer, in the current folder, and its queue."""

    def __init__(self, folder: Path, queue: str, command: "Command") -> None:
        self.folder = folder
        self.queue = queue
        self.command = command
        for name, events in VERSIONS.items():
            (folder / f"{name}.py").write_text(VERSION.format(events=events))

    def deploy(self, name: str) -> None:
        """Let a version start, and stop when its queue is empty."""
        ran = self.command("consume", f"{name}:consumer", "--drain")
        # What it does not take is a dead letter, which is told by 1.
        assert ran.code in {0, 1}, ran.err

    def needed(self, name: str) -> dict[str, bool]:
        """The types of events that come, and whether a version needs them."""
        found = self.ask("list", name)["bindings"]
        return {binding["pattern"]: binding["needed"] for binding in found}

    def pruned(self, name: str) -> list[str]:
        """What a version has pruned."""
        pruned = self.ask("prune", name, "--yes")["pruned"]
        return [binding["pattern"] for binding in pruned]

    def ask(self, action: str, name: str, *arguments: str) -> dict[str, Any]:
        """What a command prints as JSON."""
        ran = self.command("bindings", action, f"{name}:consumer", "--json", *arguments)
        assert (ran.code, ran.err) == (0, "")
        answer: dict[str, Any] = json.loads(ran.out)
        return answer

    def comes(self, *types: str) -> list[str]:
        """Those of these types of which a new event comes into the queue."""
        with closing(open_transport(self.queue)) as transport:
            return [each for each in types if _is_taken(transport.publish, each)]


def _is_taken(publish: Callable[..., None], type_: str) -> bool:
    try:
        publish(f"events:{type_}", [Message("1")])
    except PublishRefused:
        return False
    return True


@pytest.fixture
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of the queue's transport: a test may name a fixture instead of RabbitMQ's."""
    name = getattr(request, "param", "rabbitmq_url")
    if name == "sqlite":
        return f"sqlite:///{tmp_path}/queue.db"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
def service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str, command: "Command"
) -> Iterator[Service]:
    """The service, with a ledger in SQLite; no trace of it stays in this process."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 1e9)
    monkeypatch.setenv("SHOP_QUEUE", queue)
    monkeypatch.setenv("SHOP_LEDGER", url)
    yield Service(tmp_path, queue, command)
    for name in VERSIONS:
        module = sys.modules.pop(name, None)
        if module is not None and module.ledger is not None:
            module.ledger.close()


every_queue = pytest.mark.parametrize(
    "queue", ["rabbitmq_url", "sqlite", "postgresql_url", "mysql_url"], indirect=True
)


# ---- Pruning -----------------------------------------------------------------------------------


@every_queue
def test_prune(service: Service) -> None:
    """What only the older version took comes no more, and all else does; it is safe to repeat."""
    service.deploy("old")
    service.deploy("new")
    expected = {CANCELLED: False, PLACED: True, RETURNED: True}
    assert service.needed("new") == expected
    assert service.comes(PLACED, CANCELLED, RETURNED) == [PLACED, CANCELLED, RETURNED]
    assert service.pruned("new") == [CANCELLED]
    assert service.comes(PLACED, CANCELLED, RETURNED) == [PLACED, RETURNED]
    assert service.needed("new") == {PLACED: True, RETURNED: True}
    assert service.pruned("new") == []
    # The older version again, as after a rollback.
    service.deploy("old")
    assert service.needed("old") == {CANCELLED: True, PLACED: True, RETURNED: False}


@every_queue
def test_too_early(service: Service) -> None:
    """Before the newer version has started nothing is pruned: what it needs does not come yet."""
    service.deploy("old")
    assert service.ask("list", "new")["missing"] == [RETURNED]
    ran = service.command("bindings", "prune", "new:consumer", "--yes")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "oncely: the queue is not bound to 'order.returned' yet, which the consumer needs; start "
        "this version of the consumer, and prune when no older version runs\n"
    )
    assert service.comes(PLACED, CANCELLED) == [PLACED, CANCELLED]


@every_queue
def test_all_is_taken(service: Service) -> None:
    """A version that takes every type needs all that comes."""
    service.deploy("old")
    service.deploy("everything")
    assert service.needed("everything") == {CANCELLED: True, PLACED: True}
    assert service.pruned("everything") == []


def test_made_by_hand(service: Service) -> None:
    """What somebody has bound by hand is not listed, and stays."""
    service.deploy("old")
    service.deploy("new")
    with closing(pika.BlockingConnection(pika.URLParameters(service.queue))) as connection:
        connection.channel().queue_bind("orders", "oncely", "by.hand")
        connection.channel().queue_bind("orders", "amq.topic", CANCELLED)
        assert service.pruned("new") == [CANCELLED]
        assert service.comes("by.hand", CANCELLED) == ["by.hand"]
        properties = pika.BasicProperties(message_id="2", type=CANCELLED)
        connection.channel().basic_publish("amq.topic", CANCELLED, b"{}", properties)
    with closing(open_transport(service.queue)) as transport:
        found = [transport.receive("orders", 1, 10.0) for _ in range(2)]
    assert [delivery.message.id for [delivery] in found] == ["1", "2"]


def test_ledger_with_queues(service: Service) -> None:
    """What a ledger remembers of RabbitMQ makes no queue in its own database."""
    service.deploy("old")
    with closing(open_transport(f"sqlite:///{service.folder}/ledger.db")) as transport:
        for destination in ("orders", f"events:{PLACED}"):
            with pytest.raises(PublishRefused, match="no queue takes it"):
                transport.publish(destination, [Message("1")], create=False)
        assert transport.bindings("orders") == []


def test_another_exchange(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the exchange has changed, the bindings to the former are not needed."""
    service.deploy("old")
    monkeypatch.setenv("SHOP_QUEUE", f"{service.queue}?exchange=shop")
    service.deploy("new")
    found = service.ask("list", "new")["bindings"]
    assert {(each["exchange"], each["pattern"]) for each in found if each["needed"]} == {
        ("shop", PLACED),
        ("shop", RETURNED),
    }
    assert service.pruned("new") == [CANCELLED, PLACED]
    assert service.comes(PLACED, CANCELLED) == []


def test_gone_already(service: Service) -> None:
    """What somebody has removed by hand, with the queue or without, is forgotten."""
    service.deploy("old")
    service.deploy("new")
    with closing(pika.BlockingConnection(pika.URLParameters(service.queue))) as connection:
        connection.channel().queue_delete("orders")
        connection.channel().exchange_delete("oncely")
    assert service.pruned("new") == [CANCELLED]
    assert service.needed("new") == {PLACED: True, RETURNED: True}


def test_killed_in_between(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune that did not come to its end is done again."""
    service.deploy("old")
    service.deploy("new")

    def die(*_: object) -> None:
        raise StoreUnavailable("no route")

    with monkeypatch.context() as patch:
        patch.setattr("oncely.engine.mailbox.LedgerMailbox.unbind", die)
        assert service.command("bindings", "prune", "new:consumer", "--yes").code == 1
    assert service.comes(CANCELLED) == []
    assert service.pruned("new") == [CANCELLED]


# ---- Asking, and telling -----------------------------------------------------------------------


def test_table(service: Service) -> None:
    """A row for each binding; what was pruned has a line."""
    ran = service.command("bindings", "list", "new:consumer")
    assert (ran.code, ran.out) == (0, "")
    assert ran.err == (
        "no bindings of queue 'orders'\n"
        "not bound yet: 'order.placed'; start the consumer\n"
        "not bound yet: 'order.returned'; start the consumer\n"
    )
    service.deploy("old")
    service.deploy("new")
    ran = service.command("bindings", "list", "new:consumer")
    assert [line.split() for line in ran.out.splitlines() if "─" not in line] == [
        ["type", "exchange", "needed"],
        [CANCELLED, "oncely", "no"],
        [PLACED, "oncely", "yes"],
        [RETURNED, "oncely", "yes"],
    ]
    ran = service.command("bindings", "prune", "new:consumer", "--yes")
    assert ran == (0, "pruned 'order.cancelled' of exchange 'oncely'\n", "")
    ran = service.command("bindings", "prune", "new:consumer", "--yes")
    assert ran == (0, "", "nothing to prune\n")


@pytest.mark.parametrize("queue", ["sqlite"], indirect=True)
def test_asks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is removed before somebody has agreed."""
    service.deploy("old")
    service.deploy("new")
    ran = service.command("bindings", "prune", "new:consumer")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "oncely: remove from queue 'orders': 'order.cancelled'? not a terminal: "
        "add --yes to confirm\n"
    )
    answers = iter(["n\n", "n\n", "y\n"])

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return next(answers)

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert service.command("bindings", "prune", "new:consumer").code == 1
    ran = service.command("bindings", "prune", "new:consumer", "--json")
    assert (ran.code, ran.out) == (1, '{"pruned": [], "audit_error": null}\n')
    assert service.comes(CANCELLED) == [CANCELLED]
    assert service.command("bindings", "prune", "new:consumer").code == 0
    assert service.comes(CANCELLED) == []


@pytest.mark.parametrize("ledger", ["", "memory://", "redis"])
@pytest.mark.parametrize("action", ["list", "prune"])
def test_nothing_remembers(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    ledger: str,
    action: str,
) -> None:
    """Without a ledger in SQL nobody knows what is bound on RabbitMQ, which is told in a line."""
    url = request.getfixturevalue("redis_url") if ledger == "redis" else ledger
    monkeypatch.setenv("SHOP_LEDGER", url)
    service.deploy("new")
    assert service.command("bindings", action, "new:consumer") == (
        2,
        "",
        (
            "oncely: the bindings of queue 'orders' are not known: the broker does not list them, "
            "and the consumer has no ledger in SQL; type: rabbitmqctl list_bindings\n"
        ),
    )


@pytest.mark.parametrize("queue", ["sqlite"], indirect=True)
def test_queue_in_sql_without_a_ledger(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue in SQL knows by itself what it has subscribed to."""
    monkeypatch.setenv("SHOP_LEDGER", "")
    service.deploy("old")
    service.deploy("new")
    assert service.pruned("new") == [CANCELLED]


@pytest.mark.parametrize("queue", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://shop", '"memory://" is seen by one process only'),
        ("sqlite:///gone.db", "there is no file 'gone.db'"),
    ],
)
@pytest.mark.parametrize("is_typed", [True, False])
def test_no_such_queue(
    service: Service, monkeypatch: pytest.MonkeyPatch, url: str, said: str, *, is_typed: bool
) -> None:
    """A transport in which nothing can be is refused, and no file left behind."""
    if not is_typed:
        monkeypatch.setenv("SHOP_QUEUE", url)
    typed = ["--transport", url] if is_typed else []
    ran = service.command("bindings", "list", "new:consumer", *typed)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"oncely: transport: {said}")
    assert ran.err.count("\n") == 1
    assert not (service.folder / "gone.db").exists()
