"""The operators' commands over a ledger in SQLite: what they print, and what they do not do."""

import io
import json
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Answer, Command, Keyboard, OnFile, Shop, cells
from tests.records import record_of

from oncely import Granted, Key, Message, Policy, State, open_ledger
from oncely.cli import main as run_main
from oncely.core.waiting import WaitingMessage, queue_named

ONE = Key("billing", "order-1")

NOT_RETRIED = "only a message that has failed or is in doubt can be retried"
LIVE = "a record with a live claim cannot be forgotten, nor one that has changed since it was found"


# ---- status ------------------------------------------------------------------------------------


def test_status(filled: OnFile, command: Command) -> None:
    """A row for each consumer and a total, ages in units that people use. As JSON, one object on
    stdout, times in seconds.
    """
    code, out, err = command("status")
    assert (code, err) == (0, "")
    names, *shown = cells(out)[1:-1]
    columns = "consumer processing handled completed failed doubt duplicates processing"
    assert " ".join(names) == columns
    # The youngest one's age is that of the test.
    assert re.fullmatch(r"\d+ s", shown[1].pop())
    assert shown == [
        ["billing", "1", "0", "1", "1", "1", "1", "3 h 12 min"],
        ["sms", "1", "1", "0", "1", "0", "0"],
        ["total", "2", "1", "1", "2", "1", "1", "3 h 12 min"],
    ]
    assert out.splitlines()[-1].startswith("size ")
    ran = command("status", "--json")
    found = json.loads(ran.out)
    parts = {"consumers", "total", "backlog", "queues", "size_bytes"}
    assert set(found) == {"verdict", "stuck", "problems", *parts}
    billing = found["consumers"]["billing"]
    assert billing.pop("oldest_processing_s") == pytest.approx(11_525, abs=60)
    assert billing.pop("in_doubt_s") == pytest.approx(11_225, abs=60)
    assert billing == {
        "records": 3,
        "processing": 1,
        "handled": 0,
        "completed": 1,
        "failed": 1,
        "in_doubt": 1,
        "waiting_for_sender": 0,
        "duplicates": 1,
        "waiting": 0,
        "waiting_lag_s": 0.0,
        "dead_letters": 0,
        "waiting_for_sender_s": None,
        "is_estimate": False,
    }
    assert found["total"]["records"] == 6
    assert found["size_bytes"] > 0
    assert found["backlog"] == {"waiting": 0, "set_aside": 0, "lag_s": 0.0}
    assert ran.out.count("\n") == 1


def test_status_of_what_waits(
    shop: Shop, at: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the records stand retries and dead letters, of those who have any, and each queue."""
    at.complete("billing", "1")
    shop.fail(Message(""), Message("a"))
    shop.wait(Message("b"), "1h")
    claimless = WaitingMessage("c", "", Message("c"), Key("", "c"), queue=queue_named("[web]"))
    at.ledger.mailbox.keep([claimless])
    out = command("status").out
    table = cells(out)
    first = table.index(["waiting for", "overdue", "waiting for", "dead"])
    assert table[first + 1] == ["consumer", "a retry", "for", "their sender", "letters"]
    assert table[first + 2 : first + 4] == [
        ["shop", "1", "-", "0", "2"],
        ["total", "1", "-", "0", "2"],
    ]
    assert re.fullmatch(r"queue \[web\]: 1 waiting( \(oldest: \d+ s\))?", out.splitlines()[-2])
    found = json.loads(command("status", "--json").out)
    billing, own = (found["consumers"][name] for name in ("billing", "shop"))
    assert (own["waiting"], own["waiting_lag_s"], own["dead_letters"]) == (1, 0.0, 2)
    assert (billing["waiting"], billing["dead_letters"]) == (0, 0)
    assert (found["queues"]["[web]"]["waiting"], found["backlog"]["waiting"]) == (1, 0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert re.search(r"\x1b\[31m +2\x1b\[0m", command("status").out)


class UntilThree(io.StringIO):
    """Ctrl-C follows the third block."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if "as of " in text and self.getvalue().count("as of ") == 3:
            signal.raise_signal(signal.SIGINT)
        return written


def test_watch(filled: OnFile) -> None:
    """In a pipe a block follows another, each with its time; Ctrl-C ends it with 0."""
    with redirect_stdout(UntilThree()) as out:
        assert run_main(["status", "--watch", "0.01"]) == 0
    assert sum(line.startswith("billing ") for line in out.getvalue().splitlines()) == 3


def test_watch_on_a_terminal(filled: OnFile) -> None:
    """There it is drawn in place, and the cursor is given back."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "oncely", "status", "--watch", "0.05"],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    is_told = False
    with suppress(OSError):  # So it is told that the other end is closed.
        while some := os.read(ours, 16):  # Fewer than a block has: one may come in pieces.
            seen += some
            # Once: a second one would end it where it stands.
            if not is_told and seen.count(b"as of ") >= 3:
                is_told = True
                process.send_signal(signal.SIGINT)
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\x1b[1A" in seen  # Up again, over what was there.
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"as of ")


@pytest.mark.parametrize("words", [["status"], ["list"], ["show", "order-2"]], ids=" ".join)
def test_colours(
    filled: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """Failed and in doubt stand out on a terminal: not in a pipe, nor where NO_COLOR is set."""
    red, yellow = "\x1b[31m", "\x1b[33m"
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in command(*words).out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = command(*words).out
    assert red in out
    assert (yellow in out) is (words != ["show", "order-2"])
    monkeypatch.setenv("NO_COLOR", "1")
    out = command(*words).out
    assert red not in out
    assert yellow not in out


# ---- list and show -----------------------------------------------------------------------------


def test_list(filled: OnFile, command: Command) -> None:
    """A line for each record, longest unseen first, with how long ago that was. A list that is cut
    says so, and so does one that is empty.
    """
    code, out, err = command("list")
    assert (code, err) == (0, "")
    header, *lines = cells(out)
    assert header == ["consumer", "id", "state", "attempts", "fence", "last seen", "error"]
    assert lines[0] == ["billing", "doubtful", "in doubt", "1", "1", "3 h 12 min ago"]
    assert lines[3] == [
        *("sms", "order-1", "exhausted", "1", "1", "3 h 12 min ago", "Refused: no such number")
    ]
    assert [line[:3] for line in lines[4:]] == [
        ["sms", "to-send", "handled"],
        ["sms", "live", "processing"],
    ]
    assert command("list", "--limit", "2").err == "the first 2; more records match, see --limit\n"
    assert command("list", "--id-contains", "nothing") == (0, "", "no matching records\n")


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--state", "processing"], ["doubtful", "live"]),
        (["--state", "in-doubt"], ["doubtful"]),
        (["--state", "in doubt"], ["doubtful"]),
        (["--state", "exhausted"], ["order-1"]),
        (["--state", "exhausted", "--consumer", "billing"], []),
        (["--state", "completed"], ["order-1"]),
        (["--state", "sent", "--consumer", "sms"], []),
        (["--consumer", "sms", "--id-contains", "order"], ["order-1"]),
        (["--older-than", "1h", "--consumer", "sms"], ["order-1", "to-send"]),
        (["--older-than", "4h"], []),
        (["--id-contains", "%"], []),
        (["--limit", "2"], ["doubtful", "order-1"]),
    ],
)
def test_list_filtered(
    filled: OnFile, command: Command, filters: Sequence[str], found: list[str]
) -> None:
    """Every filter holds, and `more` says whether the limit has left some out."""
    report = json.loads(command("list", "--json", *filters).out)
    assert [record["message_id"] for record in report["records"]] == found
    assert report["more"] is ("--limit" in filters)


def test_the_newest_first(filled: OnFile, command: Command) -> None:
    """What was seen last comes first, whatever filters hold; the limit leaves out the oldest."""

    def ids(*filters: str) -> list[str]:
        report = json.loads(command("list", "--json", "--sort", "newest", *filters).out)
        return [record["message_id"] for record in report["records"]]

    oldest_first = json.loads(command("list", "--json").out)["records"]
    assert ids() == [record["message_id"] for record in reversed(oldest_first)]
    assert ids("--limit", "1") == ["live"]
    assert ids("--state", "exhausted") == ["order-1"]
    assert ids("--consumer", "sms", "--id-contains", "order") == ["order-1"]
    assert ids("--older-than", "1h", "--consumer", "sms", "--state", "processing") == []


def test_list_by_id(filled: OnFile, command: Command) -> None:
    """In the order of the ids; a list that is cut says after which id the next one goes on."""

    def report(*options: str) -> Any:
        return json.loads(command("list", "--json", "--sort", "id", *options).out)

    whole = report()
    ids = [record["message_id"] for record in whole["records"]]
    assert ids == ["doubtful", "live", "order-1", "order-1", "order-2", "to-send"]
    assert (whole["more"], whole["end"], whole["looked_at"]) == (False, None, 6)
    first = report("--limit", "2")
    assert (first["more"], first["end"]) == (True, "live")
    assert [each["message_id"] for each in report("--after", "live")["records"]] == ids[2:]
    assert command("list", "--sort", "id", "--limit", "2").err == (
        "more records may match; go on with: --after=live\n"
    )
    for options, found in (
        (["--id-begins", "order"], ids[2:5]),
        (["--id-begins", "order", "--consumer", "sms"], ["order-1"]),
        (["--id-contains", "r-2"], ["order-2"]),
        (["--state", "exhausted"], ["order-1"]),
        (["--older-than", "4h"], []),
    ):
        assert [each["message_id"] for each in report(*options)["records"]] == found, options
    assert command("list", "--sort", "id", "--id-begins", "x").err == "no matching records\n"


def test_list_as_json_has_every_field(filled: OnFile, command: Command) -> None:
    """What `show` and `list` print as JSON is the record as the ledger has it."""
    record = record_of(filled.ledger, ONE)
    fields = {name: value for name, value in record._asdict().items() if name != "key"}
    expected = {
        **fields,
        "consumer": "billing",
        "message_id": "order-1",
        "state": "completed",
        "standing": "completed",
        "error": None,
    }
    [listed] = json.loads(command("list", "--json", "--state", "sent").out)["records"]
    assert listed == expected
    shown = json.loads(command("show", "order-1", "--consumer", "billing", "--json").out)
    nothing: dict[str, Any] = {"deferred": [], "steps": {}, "waiting": None, "dead_letters": []}
    assert shown == expected | nothing


def test_show_says_where_the_message_is(shop: Shop, command: Command) -> None:
    """Of what waits to be tried again `show` says when it is due, of a dead letter its number."""
    [number] = shop.fail(Message("a"))
    shop.wait(Message("b"), "1h")
    assert f"dead letter {number}: ValueError: no such customer" in command("show", "a").out
    assert re.search(r"waits for a retry: .*in 59 min", command("show", "b").out)
    [letter] = json.loads(command("show", "a", "--json").out)["dead_letters"]
    assert (letter["id"], letter["body"]) == (number, "")
    waiting = json.loads(command("show", "b", "--json").out)["waiting"]
    assert waiting["error"].endswith("OSError: away")


def test_verdict_of_the_status(shop: Shop, at: OnFile, command: Command) -> None:
    """The status as JSON says in a line whether anything is stuck."""
    assert json.loads(command("status", "--json").out)["verdict"] == "nothing is stuck"
    shop.fail(Message("a"))
    at.claim("billing", "doubtful")
    at.age(7_500)
    found = json.loads(command("status", "--json").out)
    assert re.fullmatch(r"stuck: 1 in doubt \(oldest: 2 h\); 1 dead letter", found["verdict"])
    assert [each["what"] for each in found["stuck"]] == ["in doubt", "dead letters"]


@pytest.mark.parametrize(
    "words",
    [
        ["list"],
        ["list", "--state", "failed", "--json"],
        ["show", "order-1"],
        ["reset", "order-1"],
        ["reset", "--state", "failed", "--yes"],
        ["forget", "--yes"],
        ["purge", "--older-than", "0s"],
    ],
    ids=" ".join,
)
def test_consumer_that_nobody_knows(filled: OnFile, command: Command, words: list[str]) -> None:
    """A name that the ledger does not know is a mistake, told with those that it knows."""
    ran = command(*words, "--consumer", "biling")
    known = "the ledger has records of billing, sms"
    assert ran == (2, "", f"oncely: no records of consumer 'biling': {known}\n")


def test_what_others_wrote_is_shown_as_it_stands(at: OnFile, command: Command) -> None:
    """Neither markup nor an escape sequence in an id, a name or an error does anything."""
    at.fail("[red]c\x1b[0m", "[/x]\x1b]0;owned\x07\u202e\n1", "[bold]boom\x1b[0m[/bold]\r\nmore")
    out = command("list").out
    assert "[red]c\\x1b[0m" in out
    assert "[/x]\\x1b]0;owned\\x07\\u202e\\n1" in out
    assert "[bold]boom\\x1b[0m[/bold]\n" in out
    ran = command("reset", "[/x]\x1b]0;owned\x07\u202e\n1", "--why", "\x1b[2J")
    assert ran.code == 0
    everything = out + command("status").out + command("purge").out + "".join(map(str, ran))
    assert all(character.isprintable() or character == "\n" for character in everything)


def test_what_does_not_fit_is_folded(
    at: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and names are folded where a terminal is narrow, and no column is left out."""
    monkeypatch.setenv("COLUMNS", "80")
    at.fail("notification-service", "x" * 32, "smtp-8.example refused the connection")
    lines = command("list").out.splitlines()
    assert max(map(len, lines)) == 80
    columns = "consumer id state attempts fence last seen error"
    assert " ".join(lines[0].split()) == columns
    consumer, id_, state = (lines[0].index(word) for word in ("consumer", "id", "state"))
    assert "".join(line[consumer:id_].strip() for line in lines[2:]) == "notification-service"
    assert "".join(line[id_:state].strip() for line in lines[2:]) == "x" * 32
    monkeypatch.setenv("COLUMNS", "40")
    assert " ".join(command("list").out.splitlines()[0].split()) == columns


def test_show(filled: OnFile, command: Command) -> None:
    """All fields; the consumer need not be named where only one has the message."""
    code, out, err = command("show", "to-send")
    assert (code, err) == (0, "")
    fields = {row[0]: row[1] for row in cells(out)}
    assert list(fields) == [
        *("consumer", "id", "state", "attempts", "fence", "first seen", "last seen"),
        *("lease until", "duplicates", "error", "metadata", "result", "fingerprint", "version"),
    ]
    assert fields["consumer"] == "sms"
    assert fields["last seen"].endswith(" UTC (3 h 12 min ago)")
    assert (fields["state"], fields["lease until"]) == ("handled", "none")
    doubtful = {row[0]: row[1] for row in cells(command("show", "doubtful").out)}
    assert doubtful["state"] == "in doubt"
    assert doubtful["lease until"].endswith(" UTC (3 h 7 min ago)")
    billing = cells(command("show", "order-1", "--consumer", "billing").out)
    assert ["result", '{"receipt": 7}'] in billing
    assert ["lease until", "none"] in billing


def test_show_of_what_waits(sending: OnFile, command: Command) -> None:
    """Messages to be sent and finished steps stand below; what is long is cut, but not as JSON."""
    out = command("show", "order-9").out
    assert max(map(len, out.splitlines())) <= 120
    shown = cells(out)
    first = shown.index(["waits to be sent", "to", "attempts", "error"])
    refused, waiting, steps, charge, log = shown[first + 1 :]
    assert refused[:3] == ["receipt-1", "mails", "1"]
    assert refused[3].startswith("too large: xxx")
    assert waiting == ["receipt-1", "texts", "0"]
    assert steps == ["finished step", "result"]
    assert charge[0] == "charge"
    assert charge[1].startswith('{"receipt": "éyyy')
    assert log == ["log", "null"]
    found = json.loads(command("show", "order-9", "--json").out)
    assert found["deferred"] == [
        {"id": "receipt-1", "destination": to, "attempts": attempts, "error": error}
        for to, attempts, error in [("mails", 1, "too large: " + "x" * 400), ("texts", 0, None)]
    ]
    assert found["steps"] == {"charge": {"receipt": "é" + "y" * 400}, "log": None}


def test_show_of_several_and_of_none(filled: OnFile, command: Command) -> None:
    """Where several consumers have the message, the records of all are shown; where there is no
    such record, that is all there is to say.
    """
    code, out, err = command("show", "order-1")
    assert (code, err) == (0, "")
    assert [row[1] for row in cells(out) if row[0] == "consumer"] == ["billing", "sms"]
    found = json.loads(command("show", "order-1", "--json").out)["records"]
    assert [record["consumer"] for record in found] == ["billing", "sms"]
    assert all(record["steps"] == {} for record in found)
    said = "oncely: 'order-1' is a message of billing, sms; name one with --consumer\n"
    assert command("reset", "order-1") == (2, "", said)
    assert command("show", "token=7") == (1, "", "oncely: 'token=7' is not in the ledger\n")
    ran = command("show", "live", "--consumer", "billing")
    assert ran == (1, "", "oncely: 'live' (billing) is not in the ledger\n")


@pytest.mark.parametrize("message_id", ["-1", "--json", "-x", "--", "' OR 1=1", "../a", "é \t"])
def test_odd_ids_can_be_named(at: OnFile, command: Command, message_id: str) -> None:
    """An id that looks like an option stands after two dashes."""
    at.fail("c", message_id)
    for verb in ("show", "reset", "forget"):
        assert command(verb, "--consumer", "c", "--", message_id).code == 0
    assert at.ledger.find(Key("c", message_id)) is None


# ---- reset and forget --------------------------------------------------------------------------


def test_reset(filled: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed for good may run again, and the record tells who allowed it, and why. Until it
    has run, it is seen that it waits for its sender.
    """
    ran = command("reset", "order-1", "--consumer", "sms", "--by", "ann", "--why", "new number")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("retried 'order-1' (sms) by ann: new number; may run again; waits ")
    [waits] = json.loads(command("list", "--json", "--state", "waits-for-its-sender").out)[
        "records"
    ]
    assert (waits["consumer"], waits["message_id"]) == ("sms", "order-1")
    ran = command("check")
    assert ran.code == 1
    assert ran.out.startswith("1 of the messages of 'sms' may run again, and wait for their sender")
    table = cells(command("status").out)
    assert ["sms", "0", "-", "1", "0"] in table
    verdict = json.loads(command("status", "--json").out)["verdict"]
    assert "1 waiting for its sender (oldest: " in verdict
    record = record_of(filled.ledger, Key("sms", "order-1"))
    note = (record.metadata or {})["reset"]
    assert note.items() >= {"by": "ann", "why": "new number"}.items()
    assert isinstance(filled.ledger.claim(record.key), Granted)
    assert "may run again" not in command("check").out
    monkeypatch.setenv("LOGNAME", "bob")
    found = json.loads(command("retry", "order-2", "--json").out)
    assert found["retried"][0].pop("next").startswith("may run again; waits for its sender")
    assert found == {
        "retried": [{"consumer": "billing", "message_id": "order-2"}],
        "refused": [],
        "by": "bob",
        "why": "",
        "audit_error": None,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reset", "to-send"], f"is handled: {NOT_RETRIED}"),
        (["reset", "live"], rf"is processing \(lease until 20.* UTC\): {NOT_RETRIED}"),
        (["forget", "live"], rf"is processing \(lease until 20.* UTC\): {LIVE}"),
    ],
)
def test_refused(filled: OnFile, command: Command, arguments: Sequence[str], said: str) -> None:
    """What the state of the record forbids is one line, and changes nothing."""
    before = filled.ledger.find(Key("sms", arguments[1]))
    code, out, err = command(*arguments)
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"oncely: {arguments[1]!r} \(sms\) {said}\n", err)
    assert filled.ledger.find(Key("sms", arguments[1])) == before


def test_reset_of_many(filled: OnFile, command: Command, answer: Answer) -> None:
    """Many are retried after a question, which is asked on stderr; only what can be is chosen."""
    answer("y\n")
    code, out, err = command("retry", "--consumer", "billing", "--by", "ann")
    assert code == 0
    assert err == "retry 2 records of billing? [y/N] retried 2, refused 0\n"
    waits = "may run again; waits for its sender (a broker, an HTTP client, a script) since 20"
    for line, id_ in zip(sorted(out.splitlines()), ("doubtful", "order-2"), strict=True):
        assert line.startswith(f"retried '{id_}' (billing) by ann; {waits}")
    assert filled.ledger.counts()["billing", State.FAILED] == 2


def test_interrupted(filled: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at a question changes nothing and shows no traceback."""

    def interrupt(_: Keyboard) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Keyboard())
    monkeypatch.setattr(Keyboard, "readline", interrupt)
    before = filled.ledger.counts()
    code, out, err = command("reset", "--state", "failed")
    assert (code, out) == (1, "")
    assert err.endswith("oncely: stopped\n")
    assert filled.ledger.counts() == before


@pytest.mark.usefixtures("nobody")
def test_nobody_to_ask(filled: OnFile, command: Command) -> None:
    """Where there is no terminal, many are changed only with --yes."""
    arguments = ("forget", "--state", "failed")
    wrong = "forget 2 records of billing, sms? not a terminal: add --yes to confirm"
    assert command(*arguments) == (2, "", f"oncely: {wrong}\n")
    assert filled.ledger.find(Key("sms", "order-1")) is not None
    told = command(*arguments, "--yes", "--by", "cron")
    assert told.code == 0
    assert set(told.out.splitlines()) == {
        "forgotten 'order-2' (billing) by cron; its next delivery is treated as new",
        "forgotten 'order-1' (sms) by cron; its next delivery is treated as new",
    }
    assert filled.ledger.find(Key("sms", "order-1")) is None


def test_one_needs_no_question(filled: OnFile, command: Command) -> None:
    """Filters that find one record are as good as its id; those that find none do nothing. A limit
    is kept, and it is said that others fit.
    """
    ran = command("forget", "--state", "in-doubt", "--by", "ann", "--why", "sent by hand")
    told = "'doubtful' (billing) by ann: sent by hand; its next delivery is treated as new"
    assert ran == (0, f"forgotten {told}\n", "")
    assert command("forget", "--state", "in-doubt") == (0, "", "no matching records\n")
    code, out, err = command("reset", "--older-than", "1h", "--limit", "1")
    assert (code, out.count("retried")) == (0, 1)
    assert err == "only the first 1; more records match, see --limit\n"


def test_some_of_many_refused(filled: OnFile, command: Command) -> None:
    """The refused ones are a line each, the others are done."""
    code, out, err = command("forget", "--consumer", "sms", "--yes", "--by", "ann")
    assert code == 1
    assert out.count("forgotten") == 2
    assert re.search(rf"oncely: 'live' \(sms\) is processing \(lease .*\): {LIVE}\n", err)
    assert err.endswith("forgotten 2, refused 1\n")
    report = json.loads(command("forget", "--consumer", "sms", "--json").out)
    assert report["forgotten"] == []
    assert report["refused"][0]["message_id"] == "live"


# ---- erase -------------------------------------------------------------------------------------


def test_erase(filled: OnFile, command: Command) -> None:
    """Says what was found, also that nothing was. The consumer has to be named, and to be known."""
    erase = ("erase", "order-1", "--consumer")
    assert command(*erase, "sms") == (0, "erased: records 1\n", "")
    assert command(*erase, "sms") == (0, "nothing is kept of it\n", "")
    report = json.loads(command(*erase, "billing", "--json").out)
    assert (report["erased"]["records"], report["total"], report["audit_error"]) == (1, 1, None)
    assert command("erase", "live", "--consumer", "sms").code == 1
    assert command(*erase, "biling").code == command("erase", "order-1").code == 2


# ---- purge -------------------------------------------------------------------------------------


@pytest.fixture
def old(at: OnFile) -> OnFile:
    """Records of three consumers that were last seen 100, 40 and 10 days ago."""
    for days in (60, 30, 10):
        for consumer in ("billing", "codes", "news"):
            at.complete(consumer, f"{days}")
        at.age(days * 86_400)
    return at


def test_purge_by_class(old: OnFile, command: Command) -> None:
    """Each consumer has its own time; the counts are told."""
    code, out, err = command(
        *("purge", "--retention", "billing=90d", "--retention", "codes=7d", "--batch", "1")
    )
    assert (code, err) == (0, "")
    assert [row[:3] for row in cells(out)] == [
        ["consumer", "purged", "dead letters"],
        ["billing", "1", "0"],
        ["codes", "3", "0"],
        ["news", "2", "0"],
        ["total", "6", "0"],
    ]
    assert sum(old.ledger.counts().values()) == 3


def test_purge_as_json(old: OnFile, command: Command) -> None:
    """One object, also for one consumer; a dry run is a table of what would go, up to when."""
    words = ("purge", "--consumer", "news", "--older-than", "20d")
    assert re.search(r"news +2 +0 +\d{4}-\d\d-\d\d .* UTC", command(*words, "--dry-run").out)
    report = json.loads(command(*words, "--json").out)
    assert [*report.pop("before")] == ["news"]
    rest = {"dead_letters": {}, "audit": 0, "audit_error": None}
    assert report == {"purged": {"news": 2}, "total": 2, **rest}
    assert json.loads(command("purge", "--json").out)["total"] == 4


def test_long_work_says_where_it_stands(
    old: OnFile, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress is on stderr, a line now and then where there is no terminal."""
    monkeypatch.setattr("oncely.cli.terminal._LINE_EVERY_S", 0.0)
    ran = command("purge", "--batch", "1", "--json")
    assert json.loads(ran.out)["total"] == 6
    lines = [line.rpartition("  ")[0] for line in ran.err.splitlines()]
    assert lines[:3] == ["purged 1 of billing", "purged 2 of billing", "purged 1 of codes"]
    ran = command("forget", "--state", "sent", "--yes", "--json")
    assert ran.err == "1 of 3\n2 of 3\n3 of 3\n"


def test_a_consumer_with_an_equals_sign(at: OnFile, command: Command) -> None:
    """The last equals sign parts the name from the time."""
    at.complete("a=b", "1")
    at.age(8 * 86_400)
    assert json.loads(command("purge", "--retention", "a=b=7d", "--json").out)["total"] == 1


# ---- migrate and check -------------------------------------------------------------------------


def test_migrate(tmp_path: Path, command: Command) -> None:
    """The schema is made once; the second time there is nothing to do."""
    url = f"sqlite:///{tmp_path / 'new.db'}"
    assert command("migrate", "--ledger", url) == (0, "", "migrated\n")
    again = command("migrate", "--ledger", url)
    assert again == (0, "", "nothing to do: the schema is up to date\n")
    assert json.loads(command("migrate", "--ledger", url, "--json").out) == {
        "applied": False,
        "sql": "",
    }
    with closing(open_ledger(url)) as ledger:
        assert isinstance(ledger.claim(ONE, policy=Policy()), Granted)


def test_migrate_as_sql(tmp_path: Path, command: Command) -> None:
    """The SQL is printed, makes the schema when a person runs it, and nothing is changed before."""
    file = tmp_path / "new.db"
    ran = command("migrate", "--sql", "--ledger", f"sqlite:///{file}")
    assert (ran.code, ran.err) == (0, "")
    assert not file.exists()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(ran.out)
    again = command("migrate", "--sql", "--ledger", f"sqlite:///{file}")
    assert again == (0, "", "nothing to do: the schema is up to date\n")


def test_migrate_as_sql_of_a_table_of_another_name(at: OnFile, command: Command) -> None:
    """--table says which table is meant, and nothing of the other one is changed."""
    report = json.loads(command("migrate", "--sql", "--json", "--table", "other").out)
    assert report["applied"] is False
    assert "CREATE TABLE other" in report["sql"]
    code, _, err = command("status", "--table", "other")
    assert code == 2
    assert "oncely migrate" in err
    assert command("migrate", "--table", "other").code == 0
    assert command("status", "--table", "other").code == 0


def test_check_names_what_is_stuck(sending: OnFile, command: Command) -> None:
    """What waits for people is not "no problems", and the sentence says what lists it."""
    sending.claim("billing", "doubtful")
    sending.age(1_000)
    code, out, err = command("check")
    assert (code, err) == (1, "")
    doubt, refused = out.splitlines()
    assert doubt.startswith("stuck: 1 in doubt (oldest: ")
    assert doubt.endswith("List them: oncely list --state in-doubt")
    listed = "List them: oncely outbox list --refused"
    assert refused == f"stuck: 1 deferred message set aside. {listed}"
    assert "1 set aside (oncely outbox list --refused)" in command("status").out


def test_check(at: OnFile, command: Command) -> None:
    """Each problem is a sentence, and the exit code is 1; where there is none that is said. A
    schema that somebody has changed is a problem too.
    """
    assert command("check") == (0, "no problems\n", "")
    defaults = ("--replay-window", "14d", "--broker-timeout", "30m")
    assert json.loads(command("check", "--json", *defaults).out) == {"problems": []}
    settings = ("--replay-window", "14d", "--retention", "7d", "--broker-timeout", "5m")
    code, out, err = command("check", *settings)
    assert (code, err) == (1, "")
    retention, lease = out.splitlines()
    assert retention.startswith("The retention (7d) is not longer than the replay window (14d):")
    assert lease.startswith(
        "The lease (5m) is not shorter than the broker's acknowledgement timeout (5m)"
    )
    assert json.loads(command("check", "--json", *settings).out) == {"problems": [retention, lease]}
    with closing(sqlite3.connect(at.file)) as connection:
        connection.execute("ALTER TABLE processed_messages DROP COLUMN result")
    code, out, _ = command("check")
    assert code == 1
    assert "result" in out
