"""Dead letters as a file, and groups that are larger than one decision."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.web.conftest import Reader, Trouble, as_user, forms, text

from oncely import Message, ops
from oncely.web import Role, dashboard
from oncely.web.pages import confirming, letters


@pytest.fixture
def failing(trouble: Trouble) -> Trouble:
    """Three dead letters of two groups."""
    trouble.fail(Message("a-1", b'{"password": "geheim"}'), Message("a-2"), error="no customer 7")
    trouble.fail(Message("b-1", b"\xff"), error="away")
    return trouble


def groups(failing: Trouble) -> dict[str, str]:
    """The id of each group, by its error."""
    return {each.error: each.id for each in ops.letter_groups(failing.ledger).groups}


def exported(reader: Reader, **query: str) -> list[dict[str, Any]]:
    """What the file has, a line for each."""
    answer = reader.client.get("/failed/export", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"] == 'attachment; filename="dead-letters.jsonl"'
    assert answer.headers["cache-control"] == "no-store"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_all_are_exported(failing: Trouble) -> None:
    """A file of JSON lines, as the command writes, with passwords masked; viewers have it, too."""
    reader = Reader(dashboard(failing.ledger, auth=as_user(Role.VIEWER)))
    found = exported(reader)
    assert [each["message_id"] for each in found] == ["a-1", "a-2", "b-1"]
    assert "geheim" not in json.dumps(found)
    assert (found[2]["body"], found[2]["body_base64"]) == (None, "/w==")
    assert "ValueError: away" in found[2]["error"]
    assert exported(reader, consumer="shop") == found
    assert '<a href="/failed/export">Export all as JSON lines</a>' in reader.get("/failed")
    page = reader.get("/failed", consumer="shop")
    assert '<a href="/failed/export?consumer=shop">Export all of shop as JSON lines</a>' in page


def test_a_group_is_exported(failing: Trouble) -> None:
    """All of a group, and none of another."""
    reader = Reader(dashboard(failing.ledger))
    found = exported(reader, group=groups(failing)["ValueError: no customer <n>"])
    assert [each["message_id"] for each in found] == ["a-1", "a-2"]


def test_what_people_may_not_see_is_not_exported(failing: Trouble) -> None:
    """A message is exported as the pages show it."""

    def without_body(message: Message) -> Message:
        return replace(message, body=b"(hidden)")

    reader = Reader(dashboard(failing.ledger, mask=without_body))
    assert {each["body"] for each in exported(reader)} == {"(hidden)"}


def test_nothing_to_export(failing: Trouble) -> None:
    """A consumer that is not known and a group that is gone are said so, on a page."""
    reader = Reader(dashboard(failing.ledger))
    assert "consumer 'shp'" in text(reader.get("/failed/export", 400, consumer="shp"))
    assert "there is no group 'x'" in text(reader.get("/failed/export", 404, group="x"))


def test_a_group_larger_than_a_decision(failing: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a larger group the first are decided, the page says that others are left, and the same
    button takes those.
    """
    for module in (letters, confirming):
        monkeypatch.setattr(module, "MOST", 1)
    reader = Reader(dashboard(failing.ledger, auth=as_user()))
    chosen = {"decision": "retry", "group": groups(failing)["ValueError: no customer <n>"]}
    for left in (1, 0):
        asking = reader.client.post("/letters/confirm", data=form(reader) | chosen).text
        assert "Retry: 1" in text(asking)
        assert ("decide again for the rest" in asking) is bool(left)
        reader.send(asking, "/letters/change", why="")
    assert [letter.message.id for letter in failing.ledger.dead()] == ["b-1"]


def test_a_group_among_more_than_are_looked_at(
    failing: Trouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all dead letters were looked at, nobody is told that this is all of the group."""
    monkeypatch.setattr(ops.letter_group, "__defaults__", (None, 1))
    reader = Reader(dashboard(failing.ledger, auth=as_user()))
    chosen = {"decision": "retry", "group": groups(failing)["ValueError: no customer <n>"]}
    asking = reader.client.post("/letters/confirm", data=form(reader) | chosen).text
    assert "Left out: any after the first 1 messages: decide again for the rest" in text(asking)


def form(reader: Reader) -> dict[str, Any]:
    """What the form of the groups carries besides."""
    return {"csrf": forms(reader.get("/failed"))["/letters/confirm"]["csrf"]}
