"""`oncely dead`: what was set aside is listed, shown and put back; mistakes in one line."""

import json
from base64 import b64decode
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.letters import waiting

from oncely import Message, open_transport
from oncely.core.verdicts import DeadLetter
from oncely.transports.transport import Transport

if TYPE_CHECKING:
    from tests.cli.conftest import Command, SetAside

NO_LEDGER = (
    "no ledger was named, so no tries begin again: what has spent them will be set aside again, "
    "unless it is retried with --ledger URL --consumer NAME\n"
)


@pytest.fixture(autouse=True)
def _no_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is named, unless by a test."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)


# ---- Looking -----------------------------------------------------------------------------------


def test_list(set_aside: "SetAside", command: "Command") -> None:
    """A row for each: its id and type, how often it was delivered, its age, and the reason."""
    set_aside(Message("a-1", type="order.placed", time=datetime.now(UTC) - timedelta(hours=3)))
    set_aside(Message("a-2"), "missing id")
    code, out, err = command("dead", "list", "orders")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["a-1", "order.placed", "1", "3", "h", "ValueError:", "no", "such", "customer"],
        ["a-2", "-", "1", "-", "missing", "id"],
    ]


def test_list_as_json(set_aside: "SetAside", command: "Command") -> None:
    """One object on stdout, which says whether there are more."""
    set_aside(Message("a-1", type="order.placed", source="shop", key="anna"))
    set_aside(Message("a-2", time=datetime(2026, 1, 1, tzinfo=UTC)))
    code, out, err = command("dead", "list", "orders", "--json", "--limit", "1")
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert json.loads(out) == {
        "dead_letters": [
            {
                "id": "a-1",
                "queue": "orders",
                "reason": "ValueError: no such customer",
                "deliveries": 1,
                "type": "order.placed",
                "source": "shop",
                "time": None,
                "key": "anna",
                "content_type": "application/json",
            }
        ],
        "more": True,
    }
    both = json.loads(command("dead", "list", "orders", "--json", "--limit", "2").out)
    assert not both["more"]
    assert both["dead_letters"][1]["time"] == 1_767_225_600


def test_none(set_aside: "SetAside", command: "Command") -> None:
    """A queue without dead letters is no failure."""
    set_aside(Message("a-1"))
    assert command("dead", "list", "mails") == (0, "", "mails: no dead letters\n")


def test_more_than_asked_for(set_aside: "SetAside", command: "Command") -> None:
    """What is not listed is told."""
    set_aside(Message("a-1"))
    set_aside(Message("a-2"))
    ran = command("dead", "list", "orders", "--limit", "1")
    assert "a-2" not in ran.out
    assert ran.err == "the first 1; there are more, see --limit\n"


def test_show(set_aside: "SetAside", command: "Command") -> None:
    """All of a message, its body as text where it is text, cut where it is long."""
    body = json.dumps({"to": "änne", "text": "x" * 5_000}, ensure_ascii=False).encode()
    set_aside(Message("a-1", body, "order.placed", {"traceparent": "00-ab-01"}))
    code, out, err = command("dead", "show", "orders", "a-1")
    assert (code, err) == (0, "")
    lines = {line[:12].strip(): line[13:].strip() for line in out.splitlines() if line[:12].strip()}
    assert lines["reason"] == "ValueError: no such customer"
    assert lines["headers"] == '{"traceparent": "00-ab-01"}'
    assert lines["body"].startswith('{"to": "änne", "text":')
    assert 1_900 < out.count("x") < 2_000
    assert "…" in out


def test_show_as_json(set_aside: "SetAside", command: "Command") -> None:
    """Whole, every letter of that id; what is no text in base64."""
    set_aside(Message("a-1", b"x" * 5_000))
    set_aside(Message("a-1", b"\xff\x00", headers={"a": "b"}))
    set_aside(Message("a-2"))
    ran = command("dead", "show", "orders", "a-1", "--json")
    text, binary = json.loads(ran.out)["dead_letters"]
    assert (text["body"], text["body_base64"]) == ("x" * 5_000, None)
    assert (binary["body"], b64decode(binary["body_base64"])) == (None, b"\xff\x00")
    assert binary["headers"] == {"a": "b"}
    assert "2 bytes that are no text" in command("dead", "show", "orders", "a-1").out


def test_show_nothing(set_aside: "SetAside", command: "Command") -> None:
    """An id that is not there is a failure, in one line that says how far one has looked."""
    set_aside(Message("a-1"))
    set_aside(Message("a-2"))
    assert command("dead", "show", "orders", "b") == (
        1,
        "",
        "oncely: orders: no dead letter of 'b'\n",
    )
    ran = command("dead", "show", "orders", "a-2", "--limit", "1")
    assert ran.err == "oncely: orders: no dead letter of 'a-2' among the first 1, see --limit\n"


@pytest.mark.parametrize("how", [["list", "orders"], ["show", "orders", "a"]])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_no_passwords(
    set_aside: "SetAside", command: "Command", how: list[str], form: list[str]
) -> None:
    """What looks like a password is shown nowhere, and markup and escapes are only characters."""
    reason = "cannot reach amqp://u:geheim@host \x1b[31m [red]"
    set_aside(Message("a", b'{"password": "geheim"}', headers={"token": "geheim"}), reason)
    ran = command("dead", *how, *form)
    assert ran.code == 0
    assert "geheim" not in ran.out
    assert "\x1b" not in ran.out
    assert "amqp://u:***@host" in ran.out
    assert "[red]" in ran.out


# ---- Putting back ------------------------------------------------------------------------------


def test_retry(set_aside: "SetAside", transport: Transport, command: "Command") -> None:
    """Those that are named go back, as they were; the rest stays."""
    for id_ in ("a-1", "a-2", "a-3"):
        set_aside(Message(id_, b'{"password": "geheim"}'))
    ran = command("dead", "retry", "orders", "a-3", "a-1")
    assert ran == (0, "put back: 2\n", NO_LEDGER)
    back = transport.receive("orders", 100, 0)
    assert [(it.message.id, it.message.body, it.count) for it in back] == [
        ("a-1", b'{"password": "geheim"}', 1),
        ("a-3", b'{"password": "geheim"}', 1),
    ]
    assert [letter.message.id for letter in transport.dead_letters("orders")] == ["a-2"]


def test_retry_all(set_aside: "SetAside", transport: Transport, command: "Command") -> None:
    """All of the queue go back, as many as --limit says."""
    for number in range(3):
        set_aside(Message(str(number)))
    ran = command("dead", "retry", "orders", "--all", "--limit", "2", "--json")
    assert (ran.code, json.loads(ran.out)) == (0, {"retried": 2, "missing": []})
    assert ran.err == NO_LEDGER + "the first 2 only; there are more, see --limit\n"
    assert waiting(transport) == ["0", "1"]


def test_retry_what_is_not_there(
    set_aside: "SetAside", transport: Transport, command: "Command"
) -> None:
    """What is there goes back; the code and a line tell of what is not."""
    set_aside(Message("a-1"))
    ran = command("dead", "retry", "orders", "a-1", "b", "--json")
    assert (ran.code, json.loads(ran.out)) == (1, {"retried": 1, "missing": ["b"]})
    assert ran.err == NO_LEDGER + "oncely: orders: no dead letter of 'b'\n"
    assert waiting(transport) == ["a-1"]


def test_on_a_broker(rabbitmq_url: str, command: "Command") -> None:
    """What RabbitMQ keeps is listed, stays where it is, and goes back."""
    with closing(open_transport(rabbitmq_url)) as transport:
        transport.publish("letters", [Message("a-1"), Message("a-2")])
        for _ in range(2):
            [delivery] = transport.receive("letters", 1, 30)
            transport.settle([(delivery, DeadLetter("no such customer"))])
        where = ["--transport", rabbitmq_url]
        for _ in range(2):
            listed = json.loads(command("dead", "list", "letters", "--json", *where).out)
            assert [letter["id"] for letter in listed["dead_letters"]] == ["a-1", "a-2"]
        assert command("dead", "retry", "letters", "a-1", *where).out == "put back: 1\n"
        [delivery] = transport.receive("letters", 10, 30)
        assert delivery.message.id == "a-1"
    ran = command("dead", "list", "nowhere", *where)
    assert ran == (0, "", "nowhere: no dead letters\n")


# ---- Options anywhere --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "retry orders -- a b -c",
        "retry --limit 9 orders a b -- -c",
        "retry orders --limit 9 a b -- -c",
        "retry orders --limit 9 -- a b -c",
        "retry orders a --limit 9 b -- -c",
        "retry orders a --limit 9 b --json -- -c",
        "retry -- orders a b -c",
    ],
)
def test_options_stand_anywhere(
    set_aside: "SetAside", transport: Transport, command: "Command", line: str
) -> None:
    """Before, between and behind what is named; behind -- are names only."""
    for id_ in ("a", "b", "-c", "d"):
        set_aside(Message(id_))
    assert command("dead", *line.split()).code == 0
    assert waiting(transport) == ["a", "b", "-c"]


@pytest.mark.parametrize("line", ["orders --limit 9 a", "--limit 9 orders a", "orders a --limit 9"])
def test_options_of_show_too(set_aside: "SetAside", command: "Command", line: str) -> None:
    """As with `retry`."""
    set_aside(Message("a"))
    assert command("dead", "show", *line.split()).code == 0


# ---- Mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["retry", "orders"], "retry: name the IDs of messages, or --all, and not both"),
        (["retry", "orders", "a", "--all"], "retry: name the IDs of messages, or --all"),
        (["retry", "orders", "a", "--bogus", "b"], "unrecognized arguments: --bogus; see"),
        (["retry", "orders", "--limit", "9", "-c"], "unrecognized arguments: -c; see"),
        (["list", "orders", "--limit", "9", "more"], "unrecognized arguments: more; see"),
        (["list", "orders", "--transport", ""], "no transport is named; add --transport sqlite"),
        (["list", "orders", "--transport", "memory://geheim"], "is seen by one process only"),
        (["list", "orders", "--transport", "pigeon://u:geheim@h"], "'pigeon://u:***@h' is of no"),
        (["list", "orders", "--transport", "env:NOWHERE"], "NOWHERE is not set"),
        (["list", "orders", "--transport", "sqlite:///gone.db"], "there is no file 'gone.db'"),
        (["show", "orders", "a", "--transport", "sqlite:///gone.db?visibility=5s"], "'gone.db'"),
        (["list", "orders", "--limit", "0"], "--limit: '0' is no whole number from 1"),
        (["list"], "the following arguments are required: QUEUE; see: oncely dead list --help"),
        (["show", "orders"], "the following arguments are required: ID"),
        ([], "the following arguments are required: ACTION; see: oncely dead --help"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_mistake_is_one_line(
    transport: Transport,
    command: "Command",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    """Exit code 2, and a line that says what is wrong; nothing on stdout, no file left behind."""
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    code, out, err = command("dead", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("oncely: ")
    assert said in err
    assert err.count("\n") == 1
    assert "geheim" not in err
    assert set(tmp_path.iterdir()) == before


def test_what_is_no_queue(command: "Command", tmp_path: Path) -> None:
    """A file that is no database is told in one line."""
    (tmp_path / "notes.txt").write_text("This is no database. " * 100)
    ran = command("dead", "list", "orders", "--transport", f"sqlite:///{tmp_path / 'notes.txt'}")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("oncely: ")
    assert ran.err.count("\n") == 1
