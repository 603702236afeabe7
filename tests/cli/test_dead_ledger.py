"""`oncely dead retry` with a ledger: what has spent its tries is tried again, and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.letters import waiting

from oncely import Consumer, Key, Ledger, Message, Record, State
from oncely.core.errors import TransportError
from oncely.core.verdicts import DeadLetter
from oncely.testing import granted
from oncely.transports.sql import SqliteTransport
from oncely.transports.transport import Transport

if TYPE_CHECKING:
    from tests.cli.conftest import Command, OnFile, SetAside

Fail = Callable[..., None]


@pytest.fixture
def fail(at: "OnFile", set_aside: "SetAside") -> Fail:
    """Let messages of "orders" spend their tries: exhausted in the ledger, and dead letters."""

    def fail(*ids: str) -> None:
        for id_ in ids:
            set_aside(Message(id_))
            at.fail("shop", id_, final=True)

    return fail


def test_retry_is_tried(transport: Transport, at: "OnFile", command: "Command") -> None:
    """What has spent its tries is set aside again; put back with its ledger, it is tried."""
    consumer = Consumer(transport, "orders").idempotent(at.ledger, "shop").tries(1)
    transport.publish("orders", [Message("a")])
    assert consumer.consume(lambda _: 1 / 0, drain=True).failed == 1

    command("dead", "retry", "orders", "a", "--ledger", "")
    assert consumer.consume(lambda _: None, drain=True).dead_lettered == 1

    ran = command("dead", "retry", "orders", "a", "--ledger", at.url)
    assert ran == (0, "put back: 1; reset: 1\n", "")
    assert consumer.consume(lambda _: None, drain=True).handled == 1


def test_retry_is_noted(fail: Fail, at: "OnFile", command: "Command") -> None:
    """Who did it and why is kept with the record, as with any reset."""
    fail("a", "b", "c")
    command("dead", "retry", "orders", "a", "--by", "ann", "--why", "the bank is back")
    command("dead", "retry", "orders", "b")
    a, b, c = (at.ledger.find(Key("shop", id_)) for id_ in "abc")
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.metadata is not None
    assert b.metadata is not None
    assert (a.attempts, a.exhausted) == (0, False)
    assert (a.metadata["reset"]["by"], a.metadata["reset"]["why"]) == ("ann", "the bank is back")
    assert b.metadata["reset"]["by"]
    assert b.metadata["reset"]["why"] == "its dead letter went back into orders"
    assert c.exhausted


def test_what_is_not_reset(
    set_aside: "SetAside", fail: Fail, transport: Transport, at: "OnFile", command: "Command"
) -> None:
    """Only what has failed is; all go back, and what was left as it is is told by its reason."""
    for id_ in ("doubtful", "done", "done-too", "live", "endless", "handled", "new"):
        set_aside(Message(id_))
    at.claim("shop", "doubtful")
    at.age(3_600)
    at.complete("shop", "done")
    at.complete("shop", "done-too")
    at.claim("shop", "live")
    granted(at.ledger.claim(Key("shop", "endless"), lease=None))
    at.ledger.handled(granted(at.ledger.claim(Key("shop", "handled"))))
    before = {record.key: record for record in at.ledger.scan()}
    fail("failed")
    set_aside(Message("failed"))
    ran = command("dead", "retry", "orders", "--all", "--json", "--consumer", "shop")
    assert (ran.code, json.loads(ran.out)) == (
        0,
        {
            "retried": 9,
            "missing": [],
            "reset": 1,
            "not_reset": {"in_doubt": 1, "completed": 2, "held": 2, "handled": 1, "absent": 1},
        },
    )
    assert ran.err.splitlines() == [
        "not reset: 1 (in doubt, and may have had its effect; look first, then: oncely reset ID)",
        "not reset: 2 (completed; its delivery is a duplicate)",
        "not reset: 2 (being processed)",
        "not reset: 1 (handled, and has messages to be sent)",
        "not reset: 1 (no record; its next delivery is treated as new)",
    ]
    after = {record.key: record for record in at.ledger.scan()}
    assert after.pop(Key("shop", "failed")).attempts == 0
    assert after == before
    assert len(waiting(transport)) == 9


def test_without_an_id(at: "OnFile", transport: Transport, command: "Command") -> None:
    """What no record can be of goes back as well."""
    transport.publish("orders", [Message("")])
    [delivery] = transport.receive("orders", 1, 0)
    transport.settle([(delivery, DeadLetter("missing id"))])
    ran = command("dead", "retry", "orders", "--all", "--consumer", "shop")
    assert ran.out == "put back: 1; reset: 0\n"
    assert ran.err == "not reset: 1 (no record; its next delivery is treated as new)\n"


def test_reset_before_it_goes_back(
    fail: Fail,
    transport: Transport,
    at: "OnFile",
    command: "Command",
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A crash in between leaves the letter where it is, and the same command does the rest."""
    fail("a")

    def crash(*_: object) -> int:
        raise TransportError("the broker is away")

    with monkeypatch.context() as away:
        away.setattr(SqliteTransport, "retry", crash)
        ran = command("dead", "retry", "orders", "a")
    assert (ran.code, ran.out, ran.err) == (1, "", "oncely: the broker is away\n")
    record = at.ledger.find(Key("shop", "a"))
    assert record is not None
    assert not record.exhausted
    assert command("dead", "retry", "orders", "a").out == "put back: 1; reset: 1\n"
    assert waiting(transport) == ["a"]


def test_taken_since_it_was_found(
    set_aside: "SetAside", at: "OnFile", command: "Command", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that another takes before it is reset stays with its holder."""
    set_aside(Message("a"))
    at.fail("shop", "a")
    find = Ledger.find

    def find_and_lose(ledger: Ledger, key: Key) -> Record | None:
        record = find(ledger, key)
        at.claim("shop", "a")
        return record

    monkeypatch.setattr(Ledger, "find", find_and_lose)
    ran = command("dead", "retry", "orders", "a")
    assert ran == (0, "put back: 1; reset: 0\n", "not reset: 1 (being processed)\n")
    assert [record.state for record in at.ledger.scan()] == [State.PROCESSING]


@pytest.mark.parametrize(
    ("consumers", "said"),
    [
        (["billing", "shop"], "retry: the ledger has records of billing, shop; name whose to"),
        ([], "retry: the ledger has records of nobody; name whose to reset with --consumer, or"),
        ("fedcba", "records of a, b, c, d, e, ...; name"),
    ],
)
def test_whose_records(
    set_aside: "SetAside",
    transport: Transport,
    at: "OnFile",
    command: "Command",
    consumers: list[str],
    said: str,
) -> None:
    """Where that is not plain it is to be said, before anything is changed."""
    set_aside(Message("a"))
    for consumer in consumers:
        at.fail(consumer, "a", final=True)
    ran = command("dead", "retry", "orders", "a")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err
    assert waiting(transport) == []
    ran = command("dead", "retry", "orders", "a", "--consumer", "shop")
    assert ran.out == f"put back: 1; reset: {int('shop' in consumers)}\n"
    assert all(record.exhausted for record in at.ledger.scan() if record.key.consumer != "shop")


def test_no_such_ledger(
    set_aside: "SetAside", transport: Transport, command: "Command", tmp_path: Path
) -> None:
    """A ledger's name that is mistyped is told, and nothing is put back."""
    set_aside(Message("a"))
    url = f"sqlite:///{tmp_path / 'lodger.db'}"
    ran = command("dead", "retry", "orders", "a", "--ledger", url)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "there is no file" in ran.err
    assert not (tmp_path / "lodger.db").exists()
    assert waiting(transport) == []
