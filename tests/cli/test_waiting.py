"""`oncely waiting`: what is tried again by itself, and when."""

import json
import re
import sqlite3
from contextlib import closing

from tests.cli.conftest import Command, OnFile, Shop

from oncely import Key, Message


def overdue(at: OnFile, id_: str) -> None:
    """Let a message have been due a minute ago."""
    with closing(sqlite3.connect(at.file)) as connection, connection:
        changed = connection.execute(
            "UPDATE waiting_messages SET due_at = due_at - 3600, held_until = held_until - 3600"
            " WHERE message_id = ?",
            (id_,),
        )
        assert changed.rowcount == 1


def test_waiting(shop: Shop, at: OnFile, command: Command) -> None:
    """A row for each, in the order in which they are due: whose it is, its attempts, when it is
    due, and why it failed.
    """
    shop.wait(Message("a"), "10m", "no answer from postgresql://u:geheim@h \x1b[2J")
    shop.wait(Message("b"), "30m")
    overdue(at, "b")
    code, out, err = command("waiting")
    assert (code, err) == (0, "")
    header, _, second, first = (re.split(r"  +", line.strip()) for line in out.splitlines())
    assert header == ["consumer", "message id", "attempts", "due", "error"]
    assert first[:3] == ["shop", "a", "1"]
    assert first[3].startswith("in 9 min")
    assert first[4] == "OSError: no answer from postgresql://u:***@h \\x1b[2J"
    assert second[3].startswith("overdue for 30 min")


def test_waiting_as_json(shop: Shop, command: Command) -> None:
    """One object, which says whether there are more; so is told what a table leaves out."""
    shop.wait(Message("a", type="t"), "10m")
    shop.wait(Message("b"), "10m")
    ran = command("waiting", "--limit", "1")
    assert "b" not in ran.out.split()
    assert ran.err == "the first 1; there are more, see --limit\n"
    ran = command("waiting", "--json", "--limit", "1")
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
    found = json.loads(ran.out)
    [first] = found["waiting"]
    assert found["more"] is True
    assert 500 < first["due_in_s"] <= 600
    assert 599 < first["due"] - first["since"] < 601
    assert (first["consumer"], first["message_id"], first["type"]) == ("shop", "a", "t")
    assert (first["attempts"], first["error"]) == (1, "OSError: away")
    assert json.loads(command("waiting", "--json").out)["more"] is False


def test_none_waits(shop: Shop, at: OnFile, command: Command) -> None:
    """That is no failure; a consumer that nobody knows is a mistake. Dead letters do not wait."""
    shop.fail(Message("a"))
    none = (0, "", "no messages wait for a retry\n")
    assert command("waiting") == none
    assert command("waiting", "--consumer", "shop") == none
    ran = command("waiting", "--consumer", "shp")
    said = "no waiting messages or records of consumer 'shp'; known: shop"
    assert ran == (2, "", f"oncely: {said}\n")


def test_reset_and_forget(shop: Shop, command: Command) -> None:
    """What is reset is due, and a dead letter is none any more; what is forgotten is new, and waits
    still.
    """
    shop.fail(Message("a"))
    shop.wait(Message("b"), "1h")
    for id_ in ("a", "b"):
        assert command("reset", id_).code == 0
    assert {message.id for message in shop.handled()} == {"a", "b"}
    shop.wait(Message("c"), "1h")
    assert command("forget", "c").code == 0
    assert shop.ledger.find(Key("shop", "c")) is None
    assert "in 59 min" in command("waiting").out


def test_retry(shop: Shop, at: OnFile, command: Command) -> None:
    """What waits runs with the next worker; it is noted who wanted that. So does what waits and has
    no record, since that was forgotten.
    """
    shop.wait(Message("a"), "10m")
    shop.wait(Message("b"), "10m")
    ran = command("retry", "a", "--by", "ann", "--why", "it is back")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("retried 'a' (shop) by ann: it is back; due now: ")
    at.ledger.forget(Key("shop", "b"))
    [told] = json.loads(command("retry", "b", "--json").out)["retried"]
    assert told["next"].startswith("due now: ")
    ran = command("retry", "c")
    assert (ran.code, ran.err) == (1, "oncely: 'c' is not in the ledger\n")
    handled: list[str] = []
    shop.consumer().tries(3).consume(lambda message: handled.append(message.id), drain=True)
    assert handled == ["a", "b"]
    *_, entry = at.ledger.operations.audit()
    assert (entry.action, entry.message_id, entry.changed) == ("retried", "a", 1)


def test_discard(shop: Shop, at: OnFile, command: Command) -> None:
    """What waits becomes a dead letter that says who wanted that, and does not run."""
    shop.wait(Message("a"), "10m")
    ran = command("discard", "a", "--by", "ann", "--why", "withdrawn", "--json")
    step = "failed permanently: nothing of it runs unless somebody retries it"
    told = {"consumer": "shop", "message_id": "a", "next": step}
    assert json.loads(ran.out)["discarded"] == [told]
    [letter] = at.ledger.dead()
    assert (letter.message.id, letter.reason) == ("a", "discarded by ann: withdrawn")
    assert shop.handled() == []
    ran = command("discard", "a")
    assert ran.code == 1
    assert ran.err.startswith("oncely: 'a' does not wait for a retry; to remove a dead letter, ")


def test_a_worker_has_it(shop: Shop, at: OnFile, command: Command) -> None:
    """What a worker has begun is not discarded."""
    shop.wait(Message("a"), "10m")
    at.ledger.forget(Key("shop", "a"))
    at.claim("shop", "a")
    ran = command("discard", "a", "--consumer", "shop")
    assert ran.code == 1
    assert "a worker has it in hand" in ran.err
    [waits] = at.ledger.waiting()
    assert waits.id == "a"
