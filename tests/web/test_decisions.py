"""What operators decide, by forms alone: what is shown first, done then, and refused."""

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.records import granted, record_of
from tests.web.conftest import Reader, Trouble, as_user, forms, text

from oncely import Key, Message, Relay, State
from oncely.core.waiting import OUTBOX, WaitingMessage
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import PutBack
from oncely.transports.store_transport import StoreTransport
from oncely.web import dashboard

ONE, TWO = Key("billing", "order-1"), Key("billing", "order-2")


def records(page: str) -> list[str]:
    """By what a form would name each record of a list."""
    return [unescape(each) for each in re.findall(r'name="record" value="([^"]*)"', page)]


def test_all_in_doubt_did_not_happen(filled: Trouble, operator: Reader) -> None:
    """From the overview: in doubt, all, did not happen, why, confirm. Nothing is changed before."""
    page = operator.get("/in-doubt")
    asking = operator.send(page, "/records/confirm", decision="not-happened", every="yes")
    assert "Settle: it did not happen: 2" in text(asking)
    assert "2 of consumer billing" in text(asking)
    assert record_of(filled.ledger, ONE).attempts == 1
    done = operator.send(asking, "/records/change", why="the bank says no")
    assert "2 settled" in text(done)
    step = "may run again; waits for its sender (a broker, an HTTP client, a script) since 20"
    assert f"'order-1' (billing): {step}" in text(done)
    after = record_of(filled.ledger, ONE)
    assert (after.state, after.attempts) == (State.FAILED, 0)
    note = (after.metadata or {})["reset"]
    assert (note["by"], note["why"]) == ("anna", "the bank says no")
    page = text(operator.get("/in-doubt"))
    assert "Nothing is in doubt." in page
    assert "order-1 billing 20" in page
    assert "2 waiting for their sender (oldest: 0 s)" in text(operator.get("/"))
    assert "waits for its sender" in text(operator.get("/message", id="order-1"))


def test_those_that_are_ticked(filled: Trouble, operator: Reader) -> None:
    """One of two is chosen; the other stays. Of one alone nobody has to say why."""
    page = operator.get("/in-doubt")
    asking = operator.send(
        page, "/records/confirm", decision="not-happened", record=records(page)[:1]
    )
    operator.send(asking, "/records/change", why="")
    found = [filled.ledger.find(key) for key in (ONE, TWO)]
    assert [each.attempts for each in found if each is not None] == [0, 1]


def test_nothing_is_ticked(operator: Reader) -> None:
    """Whoever has chosen nothing is told so, and has nothing to confirm."""
    page = operator.send(operator.get("/in-doubt"), "/records/confirm", decision="not-happened")
    assert "Nothing is chosen." in text(page)
    assert forms(page) == {}


def test_from_the_page_of_a_message(filled: Trouble, operator: Reader) -> None:
    """A message has the decisions that its state allows; to forget it needs a reason."""
    page = operator.get("/message", id="order-1", consumer="billing")
    asking = operator.send(page, "/records/confirm", decision="forget")
    refused = operator.send(asking, "/records/change", 400, why=" ")
    assert "Write why" in text(refused)
    assert filled.ledger.find(ONE) is not None
    operator.send(refused, "/records/change", why="sent by mistake")
    assert filled.ledger.find(ONE) is None
    for id_ in ("live", "order-5"):
        words = re.findall(r'name="decision" value="([\w-]+)"', operator.get("/message", id=id_))
        assert words == ([] if id_ == "live" else ["forget"])


def test_a_worker_was_faster(filled: Trouble, operator: Reader) -> None:
    """A record that changes between the list and the decision is left as it is, and named; the
    others are decided.
    """
    asking = operator.send(
        operator.get("/in-doubt"), "/records/confirm", decision="forget", every="yes"
    )
    filled.ledger.complete(granted(filled.ledger.claim(ONE)))
    done = text(operator.send(asking, "/records/change", why="old"))
    assert "1 forgotten, 1 refused" in done
    assert "'order-1' (billing): it has changed since it was shown" in done
    assert record_of(filled.ledger, ONE).state is State.COMPLETED
    assert filled.ledger.find(TWO) is None


def test_retry_of_letters(filled: Trouble, operator: Reader) -> None:
    """Dead letters are retried; one that is gone meanwhile is named."""
    [number] = filled.fail()
    asking = operator.send(operator.get("/failed"), "/letters/confirm", decision="retry", every="1")
    assert "1 of consumer shop" in text(asking)
    assert "order-3, ValueError: no such customer" in text(asking)
    assert "1 retried" in text(operator.send(asking, "/letters/change", why=""))
    assert filled.fail() == []
    again = text(operator.send(asking, "/letters/change", why=""))
    assert "0 retried, 1 refused" in again
    assert f"dead letter {number}: it is not there any more" in again


def test_discard_of_letters(filled: Trouble, operator: Reader) -> None:
    """A discarded one is gone, its record stays; the reason must not be empty."""
    [number] = filled.fail()
    page = operator.get("/letter", id=str(number))
    asking = operator.send(page, "/letters/confirm", decision="discard")
    refused = operator.send(asking, "/letters/change", 400, why="")
    assert filled.fail() == [number]
    operator.send(refused, "/letters/change", why="a test message")
    assert filled.fail() == []
    assert filled.ledger.find(Key("shop", "order-3")) is not None


def test_edit(trouble: Trouble) -> None:
    """A letter is handled again with what was typed as its body and type; lines end as before."""
    [number] = trouble.fail(Message("a", b'{\n "to": ""}', "order", {"trace": "on"}))
    reader = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = reader.get("/letter", id=str(number))
    [shown] = re.findall(r"(?s)<textarea[^>]*>(.*?)</textarea>", page)
    assert unescape(shown) == '\n{\n "to": ""}'
    assert "Write why" in reader.send(page, "/letters/edit", 400, type="x", body="{}", why=" ")
    body = '{\r\n "to": "anna"}'
    done = reader.send(page, "/letters/edit", type="order.fixed", body=body, why="no name")
    assert "1 retried" in text(done)
    [handled] = trouble.handled()
    assert (handled.body, handled.type) == (b'{\n "to": "anna"}', "order.fixed")
    assert handled.headers == {"trace": "on"}


@pytest.mark.parametrize("shown", [None, "(hidden)"])
@pytest.mark.parametrize(
    ("type_", "body"),
    [
        *(("order", body) for body in (b"\xff\x00", b"a\r\nb", b'{"password": "geheim"}')),
        *(("order", body) for body in (b"a\x1bb", "\u202e".encode(), b"\n\na")),
        *((type_, b"{}") for type_ in ("token=geheim", "two\nlines", "a\tb", "\u202e")),
    ],
)
def test_edit_keeps_what_it_cannot_show(
    trouble: Trouble, type_: str, body: bytes, shown: str | None
) -> None:
    """A body or type that is masked, not text, or has what a form cannot hold, is kept unless
    somebody replaces it; what turns or hides text stands in no form.
    """

    def mask(message: Message) -> Message:
        return message if shown is None else replace(message, type=shown)

    trouble.fail(Message("a", body, type_), Message("b", body, type_))
    reader = Reader(dashboard(trouble.ledger, auth=as_user(), mask=mask))
    for letter in [*trouble.ledger.dead()]:
        page = reader.get("/letter", id=str(letter.id))
        assert not re.search("geheim|[\x1b\u202e]", page)
        # As a browser sends what it was given.
        [text_of_body] = re.findall(r"(?s)<textarea[^>]*>\n?(.*?)</textarea>", page)
        sent: dict[str, Any] = {
            "body": unescape(text_of_body).replace("\r\n", "\n").replace("\n", "\r\n")
        }
        [text_of_type] = re.findall(r'name="type" value="([^"]*)"', page)
        sent["type"] = re.sub("[\r\n]", "", unescape(text_of_type))
        if letter.key.message_id == "b":
            sent["type"] = "new"
        reader.send(page, "/letters/edit", **sent, why="a blank")
    handled = sorted(trouble.handled(), key=lambda message: message.id)
    assert [(each.body, each.type) for each in handled] == [(body, type_), (body, "new")]


def test_edit_gives_an_id(trouble: Trouble) -> None:
    """A message that came without an id gets one; that of another cannot be changed."""
    [number] = trouble.fail(Message("", b"{}", "order"))
    reader = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = reader.get("/letter", id=str(number))
    assert "empty id" in text(
        reader.send(page, "/letters/edit", 400, message_id="", type="", why="x")
    )
    reader.send(page, "/letters/edit", message_id="new-1", type="", body="{}", why="id")
    [handled] = trouble.handled()
    assert handled.id == "new-1"


@pytest.mark.parametrize(
    ("to", "fields"),
    [
        ("/records/confirm", {"decision": "explode"}),
        ("/records/confirm", {"decision": "retry", "record": "{"}),
        ("/records/confirm", {"decision": "retry", "record": "[1]"}),
        ("/records/change", {"decision": "retry", "record": "7"}),
        ("/records/change", {"decision": "retry", "record": '["a", "b", Infinity]'}),
        ("/records/change", {"decision": "retry", "record": "[" * 100_000}),
        ("/waiting/change", {"decision": "discard", "record": "[" * 100_000}),
        ("/letters/confirm", {}),
    ],
)
def test_forms_that_are_not_ours(operator: Reader, to: str, fields: dict[str, str]) -> None:
    """What no page of ours sends is answered by a page, not by an error of the server."""
    csrf = forms(operator.get("/in-doubt"))["/records/confirm"]["csrf"]
    answer = operator.client.post(to, data={"csrf": csrf, **fields})
    assert answer.status_code == 400
    assert "Not possible" in answer.text


def test_unknown_names_in_a_form(operator: Reader) -> None:
    """Records and letters that are not there are left out, and named."""
    fields = forms(operator.get("/in-doubt"))["/records/confirm"]
    data = {**fields, "decision": "not-happened", "record": '["nobody", "nothing", 1]'}
    assert "'nothing' (nobody)" in text(operator.client.post("/records/confirm", data=data).text)
    data = {**fields, "decision": "retry", "id": ["999", "x"]}
    page = text(operator.client.post("/letters/confirm", data=data).text)
    assert "dead letter 999" in page
    assert "dead letter x" in page


def test_it_happened(filled: Trouble, operator: Reader) -> None:
    """What is in doubt and has happened is completed, with who said so; one that was claimed again
    meanwhile is left as it is, and named.
    """
    page = operator.get("/in-doubt")
    asking = operator.send(page, "/records/confirm", decision="happened", every="yes")
    assert "Settle: it happened: 2 messages" in text(asking)
    granted(filled.ledger.claim(TWO))
    done = operator.send(asking, "/records/change", why="both are on the bill")
    assert "1 settled, 1 refused" in text(done)
    one, two = (record_of(filled.ledger, key) for key in (ONE, TWO))
    assert (one.state, two.state) == (State.COMPLETED, State.PROCESSING)
    assert (one.metadata or {})["happened"]["by"] == "anna"


def test_a_group_is_read_at_once(trouble: Trouble, asked: list[str]) -> None:
    """The page that asks once more reads chosen letters or refused messages together, and not with
    a query for each.
    """
    letters = trouble.fail(*(Message(f"order-{number}") for number in range(20)))
    parent = Key("shop", "order-0")
    trouble.ledger.mailbox.keep(
        [WaitingMessage(f"m{n}", "mails", Message(f"m{n}"), parent, n) for n in range(20)]
    )
    taken = trouble.ledger.mailbox.take(20, "60s")
    trouble.ledger.mailbox.put_back([PutBack(each, "no", None) for each in taken])
    operator = Reader(dashboard(trouble.ledger, auth=as_user()))
    page, outbox = operator.get("/failed"), operator.get("/outbox")
    unsent = [each.number for each in taken]
    for form, shown, numbers in (("letters", page, letters), ("unsent", outbox, unsent)):
        counts = []
        for some in (numbers[:1], numbers):
            asked.clear()
            ids = [str(number) for number in some] + ["999"]
            asking = operator.send(shown, f"/{form}/confirm", decision="discard", id=ids)
            assert f"Discard: {len(some)} message" in text(asking)
            assert "message 999" in text(asking) or "dead letter 999" in text(asking)
            counts.append(len(asked))
        assert counts[0] == counts[1]


def test_what_is_not_refused_is_not_discarded(filled: Trouble, operator: Reader) -> None:
    """The page that asks once more offers no message that waits to be sent as it should."""
    [waits] = filled.ledger.mailbox.listed(OUTBOX, 1)
    [refused] = filled.ledger.mailbox.take(1, "60s")
    filled.ledger.mailbox.put_back([PutBack(refused, "no", None)])
    page = operator.get("/outbox")
    filled.ledger.mailbox.send_again()
    asking = operator.send(page, "/unsent/confirm", decision="discard", id=str(waits.number))
    assert f"message {waits.number}: it is not refused any more" in text(asking)
    assert "Discard: 0 messages" in text(asking)


def test_a_retry_is_due_or_discarded(trouble: Trouble) -> None:
    """What waits is due at once; or a dead letter, for which somebody has to say why."""
    trouble.wait(Message("order-7"))
    trouble.wait(Message("order-8"))
    operator = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = operator.get("/waiting")
    one, two = records(page)
    asking = operator.send(page, "/waiting/confirm", decision="retry", record=one)
    assert "1 retried" in text(operator.send(asking, "/waiting/change", why=""))
    [soon, later] = trouble.ledger.waiting("shop")
    assert soon.due is not None
    assert soon.due <= trouble.ledger.now()
    asking = operator.send(page, "/waiting/confirm", decision="discard", record=two)
    asking = operator.send(asking, "/waiting/change", 400, why="")
    assert "Write why" in text(asking)
    assert "1 discarded" in text(operator.send(asking, "/waiting/change", why="withdrawn"))
    [letter] = trouble.ledger.dead("shop")
    assert letter.key == later.key


def test_a_group_of_retries(trouble: Trouble) -> None:
    """Waiting messages that failed alike are a group, which is decided at once; or all are."""
    for number in range(3):
        error = f"no order {number}\n[SQL: SELECT]\n(Background on this error at: x)"
        trouble.wait(Message(f"order-{number}"), error=error)
    trouble.wait(Message("order-9"), error="away")
    operator = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = operator.get("/waiting")
    assert "OSError: no order <n> shop 3 " in text(page)
    group = re.findall(r'name="group" value="(\w+)"', page)[0]
    asking = operator.send(page, "/waiting/confirm", decision="retry", group=group)
    assert "Retry: 3 messages" in text(asking)
    assert "3 retried" in text(operator.send(asking, "/waiting/change", why="it is there"))
    due = {each.key.message_id: each.due or 0.0 for each in trouble.ledger.waiting("shop")}
    assert [id_ for id_, at in due.items() if at > trouble.ledger.now()] == ["order-9"]
    asking = operator.send(page, "/waiting/confirm", decision="discard", every="yes")
    assert "Discard: 4 messages" in text(asking)


def test_refused_messages(trouble: Trouble) -> None:
    """What the broker has refused is retried, or discarded, with a reason."""
    for id_ in ("order-7", "order-8"):
        trouble.defer(id_)
    refusing = StoreTransport(MemoryStore())
    Relay(trouble.ledger, refusing, tries=1).send_waiting()
    operator = Reader(dashboard(trouble.ledger, auth=as_user()))
    page = operator.get("/outbox")
    assert "mails 0 2 " in text(page)
    one, two = re.findall(r'name="id" value="(\d+)"', page)
    asking = operator.send(page, "/unsent/confirm", decision="retry", id=one)
    assert "1 retried" in text(operator.send(asking, "/unsent/change", why=""))
    assert trouble.ledger.mailbox.backlog().waiting == 1
    asking = operator.send(page, "/unsent/confirm", decision="discard", id=[one, two])
    assert "message " + one in asking
    done = operator.send(asking, "/unsent/change", why="sent by hand")
    assert "1 discarded" in text(done)
    assert trouble.ledger.mailbox.backlog().set_aside == 0


def test_a_change_that_is_not_in_the_audit(trouble: Trouble, tmp_path: Path) -> None:
    """Where the entry cannot be written, the page of each kind of change says that nothing was
    changed, and why. Where its counts cannot be, the page says that the change is done.
    """
    trouble.doubt("order-1")
    trouble.fail(Message("order-2"))
    trouble.wait(Message("order-3"))
    trouble.defer("order-4")
    Relay(trouble.ledger, StoreTransport(MemoryStore()), tries=1).send_waiting()
    operator = Reader(dashboard(trouble.ledger, auth=as_user()))
    refusing = "CREATE TRIGGER no BEFORE {} ON message_audit BEGIN SELECT RAISE(ABORT, 'full'); END"
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        for path, to, decision, choice in (
            ("/in-doubt", "/records", "happened", "record"),
            ("/waiting", "/waiting", "retry", "record"),
            ("/failed", "/letters", "retry", "id"),
            ("/outbox", "/unsent", "retry", "id"),
        ):
            page = operator.get(path)
            [chosen] = re.findall(rf'type="checkbox" name="{choice}" value="([^"]*)"', page)
            fields: dict[str, Any] = {"decision": decision, choice: unescape(chosen)}
            asking = operator.send(page, f"{to}/confirm", **fields)
            connection.execute(refusing.format("INSERT"))
            refused = text(operator.send(asking, f"{to}/change", 500, why=""))
            assert "nothing was changed, as the audit cannot be written: " in refused
            connection.execute("DROP TRIGGER no")
            connection.execute(refusing.format("UPDATE"))
            done = text(operator.send(asking, f"{to}/change", why=""))
            connection.execute("DROP TRIGGER no")
            assert re.search(r"\b1 (settled|retried)", done)
            assert "Done, but the audit does not say how many were changed: " in done
            assert "full" in done
    assert [each.refused for each in trouble.ledger.operations.audit()] == [None] * 4
