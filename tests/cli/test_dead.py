"""`oncely dead list`, `show`, `export`: what was set aside is looked at; mistakes in one line."""

import json
import sqlite3
from base64 import b64decode
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command, OnFile, Shop, cells

from oncely import Message

ORDER = Message("order-17", b'{"to": "anna"}', "order.placed")


def aged(at: OnFile, seconds: float) -> None:
    """Let all dead letters be that much older."""
    with closing(sqlite3.connect(at.file)) as connection, connection:
        connection.execute(
            "UPDATE waiting_messages SET created_at = created_at - ?, updated_at = updated_at - ?",
            (seconds, seconds / 2),
        )


# ---- list --------------------------------------------------------------------------------------


def test_list(shop: Shop, at: OnFile, command: Command) -> None:
    """A row for each: its number, whose it is, its id and type, its attempts, age and reason."""
    one, two = shop.fail(ORDER, Message(""))
    aged(at, 3 * 3_600 + 12 * 60 + 5)
    code, out, err = command("dead", "list")
    assert (code, err) == (0, "")
    header, first, second = cells(out)
    assert header == [
        *("id", "consumer", "message id", "type", "attempts", "first seen", "last seen"),
        "reason",
    ]
    assert first == [
        *(str(one), "shop", "order-17", "order.placed", "1", "3 h 12 min ago", "1 h 36 min ago"),
        "ValueError: no such customer",
    ]
    assert second[:5] == [str(two), "shop", "-", "-", "0"]


def test_list_as_json(shop: Shop, command: Command) -> None:
    """One object on stdout, which says whether there are more."""
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=1)
    [one] = shop.fail(Message("a", b"{}", "t", {"h": "1"}, "web", time, "text/plain", "anna"))
    shop.fail(Message("b"))
    code, out, err = command("dead", "list", "--json", "--limit", "1")
    assert (code, err, out.count("\n")) == (0, "", 1)
    found = json.loads(out)
    [letter] = found["dead_letters"]
    seen = letter.pop("first_seen"), letter.pop("last_seen")
    assert all(abs(at - datetime.now(UTC).timestamp()) < 60 for at in seen)
    assert letter == {
        "id": one,
        "consumer": "shop",
        "message_id": "a",
        "type": "t",
        "source": "web",
        "time": time.timestamp(),
        "key": "anna",
        "content_type": "text/plain",
        "attempts": 1,
        "reason": "ValueError: no such customer",
    }
    assert found["more"] is True
    assert json.loads(command("dead", "list", "--json").out)["more"] is False


def test_list_of_nobody(shop: Shop, at: OnFile, command: Command) -> None:
    """A name that is not known is a mistake, told with those that are."""
    assert command("dead", "list") == (0, "", "no dead letters\n")
    shop.fail(Message(""))  # Of which there is no record.
    at.complete("billing", "1")
    known = "no dead letters or records of consumer 'shp'; known: billing, shop"
    for how in ("list", "export"):
        file = [] if how == "list" else ["-"]
        assert command("dead", how, "--consumer", "shp", *file) == (2, "", f"oncely: {known}\n")


def test_list_the_newest_first(shop: Shop, command: Command) -> None:
    """What came last comes first, and what is not listed is told."""
    numbers = shop.fail(*(Message(str(turn)) for turn in range(4)))
    ran = command("dead", "list", "--sort", "newest", "--limit", "2", "--json")
    found = json.loads(ran.out)
    assert [letter["id"] for letter in found["dead_letters"]] == numbers[:1:-1]
    assert found["more"] is True
    ran = command("dead", "list", "--limit", "2")
    assert [row[2] for row in cells(ran.out)[1:]] == ["0", "1"]
    assert ran.err == "the first 2; there are more, see --limit\n"


# ---- show --------------------------------------------------------------------------------------


def test_show(shop: Shop, command: Command) -> None:
    """All of a letter, its traceback line by line, its body cut where it is long; as JSON the whole
    body, as text where it is text.
    """
    body = json.dumps({"to": "änne", "text": "x" * 5_000}, ensure_ascii=False).encode()
    [one] = shop.fail(Message("a", body, "order.placed", {"traceparent": "00-ab-01"}))
    code, out, err = command("dead", "show", str(one))
    assert (code, err) == (0, "")
    fields = {line[:12].strip(): line[13:].strip() for line in out.splitlines()}
    assert (fields["id"], fields["consumer"], fields["message id"]) == (str(one), "shop", "a")
    assert (fields["type"], fields["attempts"]) == ("order.placed", "1")
    assert fields["reason"] == "ValueError: no such customer"
    assert fields["headers"] == '{"traceparent": "00-ab-01"}'
    assert fields["body"].startswith('{"to": "änne", "text":')
    assert "x…" in out
    lines = [line.strip() for line in out.splitlines()]
    assert any(line.endswith("Traceback (most recent call last):") for line in lines)
    assert lines[-1] == "ValueError: no such customer"
    [other] = shop.fail(Message("b", b"\xff\x00"))[1:]
    found = json.loads(command("dead", "show", str(one), "--json").out)
    assert (found["body"].encode(), found["body_base64"]) == (body, None)
    assert found["error"].splitlines()[-1] == "ValueError: no such customer"
    found = json.loads(command("dead", "show", str(other), "--json").out)
    assert (found["body"], b64decode(found["body_base64"])) == (None, b"\xff\x00")
    assert "2 bytes that are not text" in command("dead", "show", str(other)).out


def test_show_of_none(shop: Shop, command: Command) -> None:
    """A number that is not there is told; so is one of a message that waits and is no letter."""
    shop.wait(ORDER)
    for number in ("1", "999999999999999999"):
        ran = command("dead", "show", number)
        assert ran == (1, "", f"oncely: there is no dead letter {number}\n")


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("how", ["list", "show"])
def test_no_passwords(shop: Shop, command: Command, how: str, form: list[str]) -> None:
    """What looks like a password is shown nowhere, and markup and escapes are only characters."""
    message = Message("a", b'{"password": "geheim"}', headers={"token": "geheim"})
    [one] = shop.fail(message, error="[red] \x1b[31m amqp://u:geheim@host is away")
    ran = command("dead", how, *([str(one)] if how == "show" else []), *form)
    assert ran.code == 0
    assert "geheim" not in ran.out
    assert "\x1b" not in ran.out
    assert "amqp://u:***@host" in ran.out
    assert "[red]" in ran.out


# ---- export ------------------------------------------------------------------------------------


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_export(shop: Shop, command: Command, tmp_path: Path) -> None:
    """A line for each, whole and as it came; what was in the file is replaced."""
    body = b'{"password": "geheim"}\n'
    numbers = shop.fail(Message("a", body, headers={"token": "geheim"}), Message("b", b"\xff"))
    file = tmp_path / "letters.jsonl"
    file.write_text("old")
    assert command("dead", "export", str(file)) == (0, "exported 2\n", "")
    first, second = read(file.read_text())
    assert [first["id"], second["id"]] == numbers
    assert (first["body"].encode(), first["headers"]) == (body, {"token": "geheim"})
    assert first["error"].startswith("Traceback")
    assert (second["body"], b64decode(second["body_base64"])) == (None, b"\xff")
    ran = command("dead", "export", "-", "--consumer", "shop")
    assert (ran.code, ran.out, ran.err) == (0, file.read_text(), "exported 2\n")
    assert json.loads(command("dead", "export", str(file), "--json").out) == {"exported": 2}
    assert len([*shop.ledger.dead()]) == 2


@pytest.mark.parametrize(
    "words",
    [
        "dead list",
        "dead list --consumer shop",
        "dead show 1",
        "dead retry 1",
        "dead retry --all",
        "dead edit 1 --type t",
        "dead export -",
        "dead discard 1",
        "waiting",
    ],
)
def test_where_the_broker_has_them(redis_url: str, command: Command, words: str) -> None:
    """In a store without transactions nothing waits, and a line says where to look."""
    ran = command(*words.split(), "--ledger", redis_url)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "the broker has the dead letters, in the queue NAME.dead" in ran.err
