"""Dead letters that failed alike, as groups: counted, retried and discarded together."""

import json
from pathlib import Path

from tests.cli.conftest import Command, OnFile, Shop

from oncely import Message, ops


def test_groups(shop: Shop, at: OnFile, command: Command) -> None:
    """The largest first, with a sample and all numbers; another class is another group."""
    shop.fail(Message("a"), error="no customer 1")
    shop.fail(Message("b"), error="away")
    ids = shop.fail(Message("c"), error="no customer 22")
    found = ops.letter_groups(at.ledger)
    assert [(group.error, group.count) for group in found.groups] == [
        ("ValueError: no customer <n>", 2),
        ("ValueError: away", 1),
    ]
    first = found.groups[0]
    assert (first.ids, first.sample) == ([ids[0], ids[2]], ids[2])
    assert first.first < first.last
    ran = command("dead", "groups")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[2].split()[:4] == [first.id, "shop", "2", str(first.sample)]
    told = json.loads(command("dead", "groups", "--json", "--limit", "2").out)
    assert (told["looked_at"], told["more"]) == (2, True)
    assert [group["count"] for group in told["groups"]] == [1, 1]


def test_a_group_is_changed(shop: Shop, at: OnFile, command: Command) -> None:
    """Retried or discarded, it is those of the group and no other; then there is none any more."""
    shop.fail(Message("a"), Message("b"), error="no customer 1")
    shop.fail(Message("c"), error="away")
    large, small = (group.id for group in ops.letter_groups(at.ledger).groups)
    assert command("dead", "retry", "--group", large, "--why", "they are back").code == 0
    assert [each.message.id for each in at.ledger.dead()] == ["c"]
    assert [message.id for message in shop.handled()] == ["a", "b"]
    [entry] = at.ledger.operations.audit()
    assert (entry.action, entry.changed, entry.why) == ("dead_letter_retried", 2, "they are back")
    ran = command("dead", "retry", "--group", large)
    assert (ran.code, ran.out) == (1, "")
    assert f"there is no group {large!r}" in ran.err
    assert command("dead", "discard", "--group", small).code == 0
    assert [*at.ledger.dead()] == []


def test_a_group_is_exported(shop: Shop, at: OnFile, command: Command, tmp_path: Path) -> None:
    """All of the group and no other; where there is none, an existing file stays."""
    shop.fail(Message("a"), Message("b"), error="no customer 1")
    shop.fail(Message("c"), error="away")
    [group] = [each for each in ops.letter_groups(at.ledger).groups if each.count == 2]
    file = tmp_path / "letters.jsonl"
    assert command("dead", "export", str(file), "--group", group.id).out == "exported 2\n"
    lines = file.read_text().splitlines()
    assert [json.loads(line)["message_id"] for line in lines] == ["a", "b"]
    ran = command("dead", "export", str(file), "--group", "none")
    assert (ran.code, ran.out) == (1, "")
    assert "there is no group 'none'" in ran.err
    assert len(file.read_text().splitlines()) == 2


def test_more_than_are_looked_at(shop: Shop, at: OnFile, command: Command) -> None:
    """A group that may be larger than what was looked at is said to be so."""
    shop.fail(Message("a"), Message("b"), error="no customer 1")
    [group] = ops.letter_groups(at.ledger).groups
    ran = command("dead", "retry", "--group", group.id, "--limit", "1")
    assert (ran.code, ran.out.splitlines()[0]) == (0, "retried: 1")
    assert "of the first 1 dead letters only; there are more, see --limit" in ran.err
