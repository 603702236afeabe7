"""`oncely dead retry`, `edit` and `discard`: what was set aside runs again, or goes."""

import io
import json
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Answer, Command, OnFile, Ran, Shop
from tests.records import record_of

from oncely import Key, Message

ORDER = Message("order-17", b'{"to": "ana"}', "order.placed", {"trace": "1", "by": "web"})


def left(shop: Shop) -> list[int]:
    return [letter.id for letter in shop.ledger.dead()]


def notes(shop: Shop, id_: str) -> dict[str, str]:
    """What is kept of the reset of a record."""
    record = record_of(shop.ledger, Key("shop", id_))
    assert record.metadata is not None
    found: dict[str, str] = record.metadata["reset"]
    return found


def first_lines(ran: Ran) -> tuple[int, str, str]:
    """What was printed, of stdout its first line: who takes them depends on who works."""
    return ran.code, ran.out.partition("\n")[0], ran.err


# ---- retry -------------------------------------------------------------------------------------


def test_retry(shop: Shop, command: Command) -> None:
    """Those that are named run again as they came; the rest stays. The number of a message that
    waits by itself is no dead letter's.
    """
    one, two, three = shop.fail(ORDER, Message("b"), Message("c"))
    assert first_lines(command("dead", "retry", str(three), str(one))) == (0, "retried: 2", "")
    assert left(shop) == [two]
    assert shop.handled() == [ORDER, Message("c")]
    assert left(shop) == [two]
    shop.wait(Message("a"))
    [waiting] = shop.ledger.waiting()
    assert command("dead", "retry", str(waiting.number)).code == 1
    assert command("dead", "discard", str(waiting.number)).code == 1
    assert [*shop.ledger.waiting()] == [waiting]


def test_retry_is_noted(shop: Shop, command: Command) -> None:
    """Who did it and why is kept with the record, as with any reset."""
    one, two = shop.fail(ORDER, Message("b"))
    command("dead", "retry", str(one), "--by", "ann", "--why", "the customer is there now")
    ran = command("dead", "retry", str(two), "--json", "--by", "bob")
    found = json.loads(ran.out)
    assert found.pop("next")[str(two)].startswith("due now: ")
    told = {"retried": [two], "missing": [], "by": "bob", "why": "", "audit_error": None}
    assert found == told
    noted = notes(shop, "order-17")
    assert (noted["by"], noted["why"]) == ("ann", "the customer is there now")
    assert notes(shop, "b")["by"] == "bob"


def test_retry_what_is_not_there(shop: Shop, command: Command) -> None:
    """What is there runs again; the code and a line tell of what is not."""
    [one] = shop.fail(ORDER)
    ran = command("dead", "retry", "77", str(one), "78", str(one))
    assert first_lines(ran) == (1, "retried: 1", "oncely: there is no dead letter 77, 78\n")
    assert shop.handled() == [ORDER]


def test_retry_all(shop: Shop, at: OnFile, command: Command) -> None:
    """All, or all of a consumer, as many as --limit says."""
    *_, three = shop.fail(ORDER, Message("b"), Message("c"))
    at.complete("billing", "1")
    ran = command("dead", "retry", "--all", "--consumer", "billing")
    assert ran == (0, "retried: 0\n", "no dead letters\n")
    ran = command("dead", "retry", "--all", "--limit", "2", "--consumer", "shop")
    assert first_lines(ran) == (0, "retried: 2", "the first 2 only; there are more, see --limit\n")
    assert left(shop) == [three]
    assert first_lines(command("dead", "retry", "--all")) == (0, "retried: 1", "")


# ---- edit --------------------------------------------------------------------------------------


def test_edit(shop: Shop, command: Command, tmp_path: Path) -> None:
    """It runs with what was typed in place of what it had; the rest is as it came."""
    [one] = shop.fail(ORDER)
    file = tmp_path / "body.json"
    file.write_bytes(b'{"to": "anna"}')
    how = ["--header", "trace=2", "--header", "a=b=c", "--type", "order.changed"]
    ran = command("dead", "edit", str(one), "--body", str(file), *how, "--why", "a slip")
    assert first_lines(ran) == (0, "retried: 1", "")
    headers = {"trace": "2", "by": "web", "a": "b=c"}
    assert shop.handled() == [Message("order-17", b'{"to": "anna"}', "order.changed", headers)]
    assert notes(shop, "order-17")["why"] == "a slip"


def test_edit_of_one_without_an_id(
    shop: Shop, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given one; without that, and with a second one, nothing is changed. A dash stands for
    what comes in.
    """
    one, two = shop.fail(Message("", b"{}"), ORDER)
    ran = command("dead", "edit", str(one), "--type", "t")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "--id" in ran.err
    ran = command("dead", "edit", str(two), "--id", "order-18")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "'order-18' is another message than 'order-17'" in ran.err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO('{"to": "änne"}'.encode())))
    assert command("dead", "edit", str(one), "--id", "order-16", "--body", "-").code == 0
    assert shop.handled() == [Message("order-16", '{"to": "änne"}'.encode())]
    assert left(shop) == [two]


@pytest.mark.usefixtures("nobody")
def test_edit_that_changes_nothing(shop: Shop, command: Command, tmp_path: Path) -> None:
    """What is the same as before is not retried; a file that is not there is told. Where there is
    no terminal, what is to change is to be named.
    """
    [one] = shop.fail(ORDER)
    ran = command("dead", "edit", str(one), "--type", ORDER.type)
    assert ran == (1, "", "nothing was changed\n")
    ran = command("dead", "edit", str(one), "--body", str(tmp_path / "gone"))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "cannot be read: No such file" in ran.err
    assert left(shop) == [one]
    ran = command("dead", "edit", str(one))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "not a terminal, so no editor can be opened; add --body FILE" in ran.err


def editor(folder: Path, script: str) -> str:
    """A command that edits a file as the script says, in Python."""
    file = folder / "editor.py"
    file.write_text(f"import sys\nfrom pathlib import Path\nfile = Path(sys.argv[1])\n{script}\n")
    return f"{sys.executable} {file}"


def test_edit_in_an_editor(
    shop: Shop, command: Command, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal the body is opened in an editor, and runs as that has left it."""
    [one] = shop.fail(ORDER)
    answer("")
    monkeypatch.delenv("VISUAL", raising=False)
    edits = "file.write_text(file.read_text().replace('ana', file.suffix))"
    for script, said in (("pass", "nothing was changed"), ("sys.exit(3)", "exited with code 3")):
        monkeypatch.setenv("EDITOR", editor(tmp_path, script))
        ran = command("dead", "edit", str(one))
        assert (ran.code, ran.out) == (1, "")
        assert said in ran.err
    monkeypatch.setenv("EDITOR", "no-such-editor")
    assert command("dead", "edit", str(one)).code == 2
    monkeypatch.setenv("EDITOR", editor(tmp_path, edits))
    assert first_lines(command("dead", "edit", str(one))) == (0, "retried: 1", "")
    assert [message.json() for message in shop.handled()] == [{"to": ".json"}]


# ---- discard -----------------------------------------------------------------------------------


def test_discard(shop: Shop, command: Command) -> None:
    """It goes, and its record stays as it was; one needs no question, nor do many with --yes."""
    one, two, *more = shop.fail(ORDER, Message("b"), Message("c"))
    before = [*shop.ledger.scan()]
    assert first_lines(command("dead", "discard", str(one))) == (0, "discarded: 1", "")
    ran = command("dead", "discard", str(one), "--json", "--by", "ann")
    assert (ran.code, ran.err) == (1, f"oncely: there is no dead letter {one}\n")
    told = {"discarded": [], "missing": [one], "by": "ann", "why": "", "audit_error": None}
    assert json.loads(ran.out) == {**told, "next": {}}
    assert left(shop) == [two, *more]
    assert first_lines(command("dead", "discard", "--all", "--yes")) == (0, "discarded: 2", "")
    assert left(shop) == []
    assert [*shop.ledger.scan()] == before
    assert shop.handled() == []


@pytest.mark.parametrize("text", ["n\n", "\n", "", "yep\n"])
def test_no_is_no(shop: Shop, command: Command, answer: Answer, text: str) -> None:
    """Several go after a question, which is asked on stderr; only a yes is one."""
    numbers = shop.fail(ORDER, Message("b"))
    answer(text)
    asked = "discard 2 dead letters permanently? [y/N] "
    ran = command("dead", "discard", "--all")
    assert ran == (1, "", f"{asked}nothing was changed\n")
    answer(text)
    assert json.loads(command("dead", "discard", "--all", "--json").out)["discarded"] == []
    assert left(shop) == numbers
    answer("y\n")
    assert first_lines(command("dead", "discard", "--all")) == (0, "discarded: 2", asked)
    assert left(shop) == []
