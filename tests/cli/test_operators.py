"""The operators' commands over a ledger in SQLite: what they print, and what they do not do."""

import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oncely import Granted, Key, Ledger, Policy, State, open_ledger
from oncely.cli.terminal import moment, shortened, span
from oncely.testing import granted

if TYPE_CHECKING:
    from tests.cli.conftest import Command

COMMANDS = ["migrate", "check", "status", "list", "show", "reset", "forget", "purge", "pipeline"]
ONE = Key("billing", "order-1")


class OnFile:
    """A ledger in a file, and its records made older than they are."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.url = f"sqlite:///{file}"
        self.ledger: Ledger = open_ledger(self.url)
        self.ledger.migrate()

    def fail(
        self, consumer: str, message_id: str, error: str = "no", *, final: bool = False
    ) -> None:
        """A record that has failed."""
        self.ledger.fail(granted(self.ledger.claim(Key(consumer, message_id))), error, final)

    def complete(self, consumer: str, message_id: str, result: Any = None) -> None:
        """A record that is completed."""
        self.ledger.complete(granted(self.ledger.claim(Key(consumer, message_id))), result)

    def claim(self, consumer: str, message_id: str) -> None:
        """A record in processing."""
        granted(self.ledger.claim(Key(consumer, message_id)))

    def age(self, seconds: float) -> None:
        """Let all that is there have happened that much earlier."""
        times = ("first_processed_at", "last_processed_at", "lease_until")
        earlier = ", ".join(f"{name} = {name} - {seconds}" for name in times)
        with closing(sqlite3.connect(self.file)) as connection, connection:
            connection.execute(f"UPDATE processed_messages SET {earlier}")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnFile]:
    """A ledger without records, named by ONCELY_LEDGER; a terminal of 120 columns."""
    at = OnFile(tmp_path / "ledger.db")
    monkeypatch.setenv("ONCELY_LEDGER", at.url)
    monkeypatch.setenv("COLUMNS", "120")
    yield at
    at.ledger.close()


@pytest.fixture
def filled(at: OnFile) -> OnFile:
    """Records of two consumers in all states, last seen three hours and twelve minutes ago."""
    at.claim("billing", "doubtful")
    at.complete("billing", "order-1", {"receipt": 7})
    at.ledger.claim(ONE)
    at.fail("billing", "order-2", "Timeout: the bank did not answer")
    at.fail("sms", "order-1", "Refused: no such number", final=True)
    at.ledger.handled(granted(at.ledger.claim(Key("sms", "to-send"))))
    at.age(3 * 3_600 + 12 * 60 + 5)
    at.claim("sms", "live")
    return at


def rows(out: str) -> list[list[str]]:
    """The cells of a table: what stands two blanks or more apart."""
    lines = [line for line in out.splitlines() if line.strip() and "─" not in line]
    return [[part.strip() for part in line.split("  ") if part.strip()] for line in lines]


def in_process(*arguments: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "oncely", *arguments],
        capture_output="stdin" not in settings,
        check=False,
        text=True,
        timeout=60,
        **settings,
    )


class Keyboard(io.StringIO):
    """Somebody who answers."""

    def isatty(self) -> bool:
        return True


def answering(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    monkeypatch.setattr(sys, "stdin", Keyboard(answer))


# ---- status ------------------------------------------------------------------------------------


def test_status(filled: OnFile, command: "Command") -> None:
    """A row for each consumer and a total; ages in units that people use."""
    code, out, err = command("status")
    assert (code, err) == (0, "")
    assert rows(out)[1:-1] == [
        [
            "consumer",
            "processing",
            "handled",
            "sent",
            "failed",
            "doubt",
            "duplicates",
            "processing",
        ],
        ["billing", "1", "0", "1", "1", "1", "1", "3 h 12 min"],
        ["sms", "1", "1", "0", "1", "0", "0", "0 s"],
        ["total", "2", "1", "1", "2", "1", "1", "3 h 12 min"],
    ]
    assert out.splitlines()[-1].startswith("size ")


def test_status_as_json(filled: OnFile, command: "Command") -> None:
    """One object on stdout, times in seconds."""
    ran = command("status", "--json")
    found = json.loads(ran.out)
    assert set(found) == {"consumers", "total", "size_bytes"}
    billing = found["consumers"]["billing"]
    assert billing.pop("oldest_processing_s") == pytest.approx(11_525, abs=60)
    assert billing == {
        "records": 3,
        "processing": 1,
        "handled": 0,
        "sent": 1,
        "failed": 1,
        "in_doubt": 1,
        "duplicates": 1,
    }
    assert found["total"]["records"] == 6
    assert found["size_bytes"] > 0
    assert ran.out.count("\n") == 1


# ---- list and show -----------------------------------------------------------------------------


def test_list(filled: OnFile, command: "Command") -> None:
    """A line for each record, longest unseen first, with how long ago that was."""
    code, out, err = command("list")
    assert (code, err) == (0, "")
    header, *lines = rows(out)
    assert header == ["consumer", "id", "state", "attempts", "fence", "last seen", "error"]
    assert lines[0] == ["billing", "doubtful", "in doubt", "1", "1", "3 h 12 min ago"]
    assert lines[3] == [
        *("sms", "order-1", "exhausted", "1", "1", "3 h 12 min ago", "Refused: no such number")
    ]
    assert [line[:3] for line in lines[4:]] == [
        ["sms", "to-send", "handled"],
        ["sms", "live", "processing"],
    ]


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        (["--state", "processing"], ["doubtful", "live"]),
        (["--state", "in-doubt"], ["doubtful"]),
        (["--state", "completed"], ["order-1"]),
        (["--state", "sent", "--consumer", "sms"], []),
        (["--consumer", "sms", "--text", "order"], ["order-1"]),
        (["--older-than", "1h", "--consumer", "sms"], ["order-1", "to-send"]),
        (["--older-than", "4h"], []),
        (["--text", "%"], []),
        (["--limit", "2"], ["doubtful", "order-1"]),
    ],
)
def test_list_filtered(
    filled: OnFile, command: "Command", filters: Sequence[str], found: list[str]
) -> None:
    """Every filter holds, and `more` says whether the limit has left some out."""
    report = json.loads(command("list", "--json", *filters).out)
    assert [record["message_id"] for record in report["records"]] == found
    assert report["more"] is ("--limit" in filters)


def test_list_says_what_is_missing(filled: OnFile, command: "Command") -> None:
    """A list that is cut says so, and so does one that is empty."""
    assert command("list", "--limit", "2").err == "the first 2; more fit, see --limit\n"
    assert command("list", "--text", "nothing") == (0, "", "no record fits\n")


def test_list_as_json_has_every_field(filled: OnFile, command: "Command") -> None:
    """What `show` and `list` print as JSON is the record as the ledger has it."""
    record = filled.ledger.find(ONE)
    assert record is not None
    fields = {name: value for name, value in record._asdict().items() if name != "key"}
    expected = {
        **fields,
        "consumer": "billing",
        "message_id": "order-1",
        "standing": "completed",
        "error": None,
    }
    [listed] = json.loads(command("list", "--json", "--state", "sent").out)["records"]
    assert listed == expected
    shown = json.loads(command("show", "order-1", "--consumer", "billing", "--json").out)
    assert shown == expected


def test_what_others_wrote_is_shown_as_it_stands(at: OnFile, command: "Command") -> None:
    """Neither markup nor an escape sequence in an id, a name or an error does anything."""
    at.fail("[red]c\x1b[0m", "[/x]\x1b]0;owned\x07\u202e\n1", "[bold]boom[/bold]\r\nmore")
    out = command("list").out
    assert "[red]c\\x1b[0m" in out
    assert "[/x]\\x1b]0;owned\\x07\\u202e\\n1" in out
    assert "[bold]boom[/bold]\\r\\nmore" in out
    ran = command("reset", "[/x]\x1b]0;owned\x07\u202e\n1", "--why", "\x1b[2J")
    assert ran.code == 0
    everything = out + command("status").out + command("purge").out + "".join(map(str, ran))
    assert all(character.isprintable() or character == "\n" for character in everything)


def test_ids_stay_whole(at: OnFile, command: "Command", monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the error is cut before an id is folded; in a pipe nothing is folded."""
    at.fail("notification-service", "x" * 48, "a long story. " * 30)
    assert "x" * 48 in command("list").out
    assert max(map(len, command("list").out.splitlines())) == 120
    monkeypatch.delenv("COLUMNS")
    ran = in_process("list")
    [line] = [line for line in ran.stdout.splitlines() if "x" * 48 in line]
    assert len(line) > 250


def test_show(filled: OnFile, command: "Command") -> None:
    """All fields; the consumer need not be named where only one has the message."""
    code, out, err = command("show", "to-send")
    assert (code, err) == (0, "")
    fields = {row[0]: row[1] for row in rows(out)}
    assert list(fields) == [
        *("consumer", "id", "state", "attempts", "fence", "first seen", "last seen"),
        *("lease until", "duplicates", "error", "metadata", "result", "fingerprint", "version"),
    ]
    assert fields["consumer"] == "sms"
    assert fields["last seen"].endswith(" UTC (3 h 12 min ago)")
    assert fields["lease until"].endswith(" UTC (3 h 7 min ago)")
    billing = rows(command("show", "order-1", "--consumer", "billing").out)
    assert ["result", '{"receipt": 7}'] in billing
    assert ["lease until", "none"] in billing


def test_show_of_several(filled: OnFile, command: "Command") -> None:
    """Where several consumers have the message, they are named."""
    assert command("show", "order-1") == (
        2,
        "",
        "oncely: 'order-1' is a message of billing, sms; name one with --consumer\n",
    )


def test_show_of_none(filled: OnFile, command: "Command") -> None:
    """Where there is no such record, that is all there is to say."""
    assert command("show", "gone") == (1, "", "oncely: 'gone' is not in the ledger\n")
    ran = command("show", "live", "--consumer", "billing")
    assert ran == (1, "", "oncely: 'live' (billing) is not in the ledger\n")


@pytest.mark.parametrize("message_id", ["-1", "--json", "-x", "--", "' OR 1=1", "../a", "é \t"])
def test_odd_ids_can_be_named(at: OnFile, command: "Command", message_id: str) -> None:
    """An id that looks like an option stands after two dashes."""
    at.fail("c", message_id)
    for verb in ("show", "reset", "forget"):
        assert command(verb, "--consumer", "c", "--", message_id).code == 0
    assert at.ledger.find(Key("c", message_id)) is None


# ---- reset and forget --------------------------------------------------------------------------


def test_reset(filled: OnFile, command: "Command") -> None:
    """What failed for good runs again, and the record tells who allowed it and why."""
    ran = command("reset", "order-1", "--consumer", "sms", "--by", "ann", "--why", "new number")
    assert ran == (0, "reset 'order-1' (sms) by ann: new number\n", "")
    record = filled.ledger.find(Key("sms", "order-1"))
    assert record is not None
    assert record.metadata is not None
    assert record.metadata["reset"].items() >= {"by": "ann", "why": "new number"}.items()
    assert isinstance(filled.ledger.claim(record.key), Granted)


def test_who_resets(filled: OnFile, command: "Command", monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the login name unless another is given."""
    monkeypatch.setenv("LOGNAME", "bob")
    assert json.loads(command("reset", "order-2", "--json").out) == {
        "reset": [{"consumer": "billing", "message_id": "order-2"}],
        "refused": [],
        "by": "bob",
        "why": "",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reset", "to-send"], "is handled: only what has failed or is in doubt can be reset"),
        (["reset", "live"], "is processing: only what has failed or is in doubt can be reset"),
        (["forget", "live"], "is processing: a live claim cannot be forgotten"),
    ],
)
def test_refused(filled: OnFile, command: "Command", arguments: Sequence[str], said: str) -> None:
    """What the state of the record forbids is one line, and changes nothing."""
    before = filled.ledger.find(Key("sms", arguments[1]))
    code, out, err = command(*arguments)
    assert (code, out) == (1, "")
    assert err == f"oncely: {arguments[1]!r} (sms) {said}\n"
    assert filled.ledger.find(Key("sms", arguments[1])) == before


def test_reset_of_many(filled: OnFile, command: "Command", monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are reset after a question, which is asked on stderr; only what can be is chosen."""
    answering(monkeypatch, "y\n")
    code, out, err = command("reset", "--consumer", "billing", "--by", "ann")
    assert code == 0
    assert err == "reset 2 records of billing? [y/N] reset 2, refused 0\n"
    assert set(out.splitlines()) == {
        "reset 'doubtful' (billing) by ann",
        "reset 'order-2' (billing) by ann",
    }
    assert filled.ledger.counts()["billing", State.FAILED] == 2


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yep\n"])
def test_no_is_no(
    filled: OnFile, command: "Command", monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """Only a yes is one."""
    answering(monkeypatch, answer)
    before = filled.ledger.counts()
    code, out, err = command("forget", "--older-than", "1h", "--text", "order")
    assert (code, out) == (1, "")
    assert err == "forget 3 records of billing, sms? [y/N] nothing was changed\n"
    assert filled.ledger.counts() == before


def test_nobody_to_ask(filled: OnFile) -> None:
    """Where there is no terminal, many are changed only with --yes."""
    arguments = ("forget", "--state", "failed")
    asked = in_process(*arguments, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == (
        "oncely: forget 2 records of billing, sms? Nobody is here to answer: add --yes\n"
    )
    assert filled.ledger.find(Key("sms", "order-1")) is not None
    told = in_process(*arguments, "--yes", "--by", "cron", stdin=subprocess.DEVNULL, stdout=-1)
    assert told.returncode == 0
    assert set(told.stdout.splitlines()) == {
        "forgotten 'order-2' (billing) by cron",
        "forgotten 'order-1' (sms) by cron",
    }
    assert filled.ledger.find(Key("sms", "order-1")) is None


def test_asked_on_a_terminal(filled: OnFile) -> None:
    """A real terminal is asked, and its answer taken; stdout has nothing but the report."""
    keyboard, terminal = os.openpty()
    try:
        os.write(keyboard, b"y\n")
        ran = in_process("reset", "--state", "failed", "--json", stdin=terminal, stdout=-1)
    finally:
        os.close(keyboard)
        os.close(terminal)
    assert ran.returncode == 0
    assert len(json.loads(ran.stdout)["reset"]) == 2


def test_one_needs_no_question(filled: OnFile, command: "Command") -> None:
    """Filters that find one record are as good as its id; those that find none do nothing."""
    ran = command("forget", "--state", "in-doubt", "--by", "ann", "--why", "sent by hand")
    assert ran == (0, "forgotten 'doubtful' (billing) by ann: sent by hand\n", "")
    assert command("forget", "--state", "in-doubt") == (0, "", "no record fits\n")


def test_some_of_many_refused(filled: OnFile, command: "Command") -> None:
    """The refused ones are a line each, the others are done."""
    code, out, err = command("forget", "--consumer", "sms", "--yes", "--by", "ann")
    assert code == 1
    assert out.count("forgotten") == 2
    assert "oncely: 'live' (sms) is processing: a live claim cannot be forgotten\n" in err
    assert err.endswith("forgotten 2, refused 1\n")
    report = json.loads(command("forget", "--consumer", "sms", "--json").out)
    assert report["forgotten"] == []
    assert report["refused"][0]["message_id"] == "live"


def test_a_limit_for_many(filled: OnFile, command: "Command") -> None:
    """A limit is kept, and it is said that others fit."""
    code, out, err = command("reset", "--older-than", "1h", "--limit", "1")
    assert (code, out.count("reset")) == (0, 1)
    assert err == "the first 1 only; more fit, see --limit\n"


# ---- purge -------------------------------------------------------------------------------------


@pytest.fixture
def old(at: OnFile) -> OnFile:
    """Records of three consumers that were last seen 100, 40 and 10 days ago."""
    for days in (60, 30, 10):
        for consumer in ("billing", "codes", "news"):
            at.complete(consumer, f"{days}")
        at.age(days * 86_400)
    return at


def test_purge_by_class(old: OnFile, command: "Command") -> None:
    """Each consumer has its own time; the counts are told."""
    code, out, err = command(
        *("purge", "--retention", "billing=90d", "--retention", "codes=7d", "--batch", "1")
    )
    assert (code, err) == (0, "")
    assert rows(out) == [
        ["consumer", "purged"],
        ["billing", "1"],
        ["codes", "3"],
        ["news", "2"],
        ["total", "6"],
    ]
    assert sum(old.ledger.counts().values()) == 3


def test_purge_as_json(old: OnFile, command: "Command") -> None:
    """One object, also for one consumer."""
    report = json.loads(command("purge", "--consumer", "news", "--older-than", "20d", "--json").out)
    assert report == {"purged": {"news": 2}, "total": 2}
    assert json.loads(command("purge", "--json").out)["total"] == 4


def test_purge_tells_a_slip(old: OnFile, command: "Command") -> None:
    """A name that is nearly another's purges nothing at all."""
    code, out, err = command("purge", "--retention", "biling=90d")
    assert (code, out) == (2, "")
    assert "no record is of 'biling'; did you mean 'billing'?" in err
    assert sum(old.ledger.counts().values()) == 9


def test_a_consumer_with_an_equals_sign(at: OnFile, command: "Command") -> None:
    """The last equals sign parts the name from the time."""
    at.complete("a=b", "1")
    at.age(8 * 86_400)
    assert json.loads(command("purge", "--retention", "a=b=7d", "--json").out)["total"] == 1


# ---- migrate and check -------------------------------------------------------------------------


def test_migrate(tmp_path: Path, command: "Command") -> None:
    """The schema is made once; the second time there is nothing to do."""
    url = f"sqlite:///{tmp_path / 'new.db'}"
    assert command("migrate", "--ledger", url) == (0, "", "migrated\n")
    again = command("migrate", "--ledger", url)
    assert again == (0, "", "nothing to do: the schema is the newest\n")
    assert json.loads(command("migrate", "--ledger", url, "--json").out) == {
        "applied": False,
        "sql": "",
    }
    with closing(open_ledger(url)) as ledger:
        assert isinstance(ledger.claim(ONE, policy=Policy()), Granted)


def test_migrate_as_sql(tmp_path: Path, command: "Command") -> None:
    """The SQL is printed, makes the schema when a person runs it, and nothing is changed before."""
    file = tmp_path / "new.db"
    ran = command("migrate", "--sql", "--ledger", f"sqlite:///{file}")
    assert (ran.code, ran.err) == (0, "")
    assert not file.exists()
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(ran.out)
    again = command("migrate", "--sql", "--ledger", f"sqlite:///{file}")
    assert again == (0, "", "nothing to do: the schema is the newest\n")


def test_migrate_as_sql_of_a_table_of_another_name(at: OnFile, command: "Command") -> None:
    """--table says which table is meant, and nothing of the other one is changed."""
    report = json.loads(command("migrate", "--sql", "--json", "--table", "other").out)
    assert report["applied"] is False
    assert "CREATE TABLE other" in report["sql"]
    code, _, err = command("status", "--table", "other")
    assert code == 2
    assert "oncely migrate" in err
    assert command("migrate", "--table", "other").code == 0
    assert command("status", "--table", "other").code == 0


def test_check(at: OnFile, command: "Command") -> None:
    """Where nothing is wrong that is said, and the exit code is 0."""
    assert command("check") == (0, "no problems\n", "")
    settings = ("--replay-window", "14d", "--lease", "30m", "--broker-timeout", "30m")
    assert json.loads(command("check", "--json", *settings).out) == {"problems": []}


def test_check_finds_problems(at: OnFile, command: "Command") -> None:
    """Each is a sentence, and the exit code is 1."""
    settings = ("--replay-window", "14d", "--retention", "7d", "--broker-timeout", "30m")
    code, out, err = command("check", *settings)
    assert (code, err) == (1, "")
    retention, lease = out.splitlines()
    assert retention.startswith("The retention (7d) is not longer than the replay window (14d):")
    assert lease.startswith("The lease (5m) is shorter than the broker's acknowledgement timeout")
    assert json.loads(command("check", "--json", *settings).out) == {"problems": [retention, lease]}


def test_check_finds_drift(at: OnFile, command: "Command") -> None:
    """A schema that somebody has changed is a problem too."""
    with closing(sqlite3.connect(at.file)) as connection:
        connection.execute("ALTER TABLE processed_messages DROP COLUMN result")
    code, out, _ = command("check")
    assert code == 1
    assert "result" in out


# ---- Mistakes ----------------------------------------------------------------------------------

WRONG: list[tuple[list[str], str]] = [
    (["show", ""], "ID: empty id"),
    (["show", " "], "ID: empty id"),
    (["reset", "a\0b"], "ID: id with NUL"),
    (["forget", "x" * 256], "ID: too long id"),
    (["show", "a\udcff"], "ID: id with a lone surrogate"),
    (["show", "a", "--consumer", ""], "--consumer: empty consumer"),
    (["list", "--consumer", "a\0"], "--consumer: consumer with NUL"),
    (["list", "--text", "a\udcff"], "--text: text with a lone surrogate"),
    (["list", "--older-than", "soon"], "--older-than: 'soon' is no duration; write"),
    (["list", "--older-than=-1d"], "--older-than: '-1d' is no duration"),
    (["list", "--state", "stuck"], "--state: invalid choice: 'stuck' (choose from 'processing'"),
    (["reset", "--state", "sent"], "--state: invalid choice: 'sent' (choose from 'failed'"),
    (["list", "--limit", "0"], "--limit: '0' is no whole number from 1"),
    (["list", "--limit", "9" * 5_000], "is no whole number from 1"),
    (["purge", "--batch", "-1"], "--batch: '-1' is no whole number from 1"),
    (["purge", "--older-than", "30"], "--older-than: '30' is no duration"),
    (
        ["purge", "--retention", "90d"],
        "--retention: '90d' names no consumer; write \"billing=90d\"",
    ),
    (["purge", "--retention", "=90d"], "--retention: empty consumer"),
    (["purge", "--retention", "billing=x"], "--retention: 'x' is no duration"),
    (["list", "--text", "-x"], "--text: expected one argument; see: oncely list --help"),
    (["check", "--lease", "0s"], "lease: a lease of zero"),
    (["check", "--replay-window", "x"], "--replay-window: 'x' is no duration"),
    (["status", "--table", "a b"], "table: 'a b' is no name for a table"),
    (["status", "--schema", "s"], "only PostgreSQL, MariaDB and MySQL have schemas"),
    (["status", "--table", "nowhere"], "type: oncely migrate"),
    (["reset"], "reset: name an ID, or filters such as"),
    (["forget", "--limit", "5", "--yes"], "forget: name an ID, or filters such as"),
    (["reset", "a", "--state", "failed"], "reset: an ID takes no filters but --consumer"),
    (["status", "--ledger", "memory://"], '"memory://" is seen by one process only'),
    (["status", "--ledger", "oracle://u:geheim@h"], "'oracle://u:***@h' is of no known kind"),
    (["status", "--ledger", "env:GEHEIM"], "'env:GEHEIM' is of no known kind"),
    (["status", "--ledger", "env:NOWHERE"], "the environment variable NOWHERE is not set"),
    (["status", "--ledger", "sqlite:///nowhere.db"], "there is no file 'nowhere.db'"),
    (["migrate", "--ledger", "sqlite:///nowhere/l.db"], "its folder does not exist"),
    (["status", "--ledger", ""], "no ledger is named; add --ledger sqlite:///ledger.db"),
    (["status", "--jsn"], "unrecognized arguments: --jsn; see: oncely --help"),
    (["stauts"], "invalid choice: 'stauts'"),
    ([], "the following arguments are required: COMMAND; see: oncely --help"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_a_mistake_is_one_line(
    at: OnFile,
    command: "Command",
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    """Exit code 2, and a line that says what is wrong; nothing on stdout, no file left behind."""
    monkeypatch.setenv("GEHEIM", "geheim")
    monkeypatch.chdir(at.file.parent)
    before = set(at.file.parent.iterdir())
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("oncely: ")
    assert said in err
    assert err.count("\n") == 1
    assert "geheim" not in err
    assert set(at.file.parent.iterdir()) == before


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("pipeline", "migrate")])
def test_no_ledger(
    command: "Command", monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Every command says that it needs a ledger, and that the one which is named is not there."""
    monkeypatch.delenv("ONCELY_LEDGER", raising=False)
    id_ = ["a"] if name in ("show", "reset", "forget") else []
    assert command(name, *id_).err == (
        "oncely: no ledger is named; add --ledger sqlite:///ledger.db, or the like\n"
    )
    ran = command(name, *id_, "--ledger", f"sqlite:///{tmp_path}/gone.db")
    assert ran == (
        2,
        "",
        f"oncely: ledger: there is no file '{tmp_path}/gone.db'; type: oncely migrate\n",
    )


@pytest.mark.parametrize("name", ["status", "list", "purge", "check", "migrate"])
def test_what_is_no_ledger(command: "Command", tmp_path: Path, name: str) -> None:
    """A file that is no database is told in one line."""
    file = tmp_path / "notes.txt"
    file.write_text("This is no database. " * 100)
    code, out, err = command(name, "--ledger", f"sqlite:///{file}")
    assert (code, out) == (1, "")
    assert "file is not a database" in err
    assert err.count("\n") == 1


def test_a_store_that_cannot_be_reached(command: "Command", tmp_path: Path) -> None:
    """An unreachable store is one line too, without its password."""
    url = "postgresql://ann:geheim@127.0.0.1:1/db?connect_timeout=1"
    code, out, err = command("status", "--ledger", url)
    assert (code, out) == (1, "")
    assert "geheim" not in err
    assert err.count("\n") == 1


def test_help_lists_every_command() -> None:
    """`oncely --help` names them all."""
    ran = in_process("--help")
    assert ran.returncode == 0
    assert all(f"\n    {name} " in ran.stdout for name in COMMANDS)


WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
from oncely.cli import main
sys.exit(main(sys.argv[2:]))
"""


def without(packages: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command where some packages are not installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, packages, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )


def test_missing_packages(filled: OnFile) -> None:
    """Operators need rich and no more; where it is missing, the extra is named."""
    assert without("pydantic,pyspark,pyarrow", "list").returncode == 0
    ran = without("rich", "list")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.endswith("is not installed; type: pip install 'oncely[cli]'\n")
    assert ran.stderr.count("\n") == 1
    assert "\n    list " in without("rich", "--help").stdout


def test_nobody_reads_on(filled: OnFile) -> None:
    """`oncely list --json | head` ends without a traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    ran = subprocess.run(
        [sys.executable, "-m", "oncely", "list", "--json"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (1, "")


def test_bytes_that_are_no_text(at: OnFile) -> None:
    """An argument that is no UTF-8 is a mistake like others."""
    ran = in_process("show", os.fsdecode(b"a\xff"))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "oncely: ID: id with a lone surrogate; no record can have it\n"


def test_a_poor_terminal(at: OnFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal's encoding lacks is written out."""
    at.fail("c", "é")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ran = in_process("list")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\\xe9" in ran.stdout


def test_interrupted(filled: OnFile, command: "Command", monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at a question changes nothing and shows no traceback."""

    def interrupt(_: Keyboard) -> str:
        raise KeyboardInterrupt

    answering(monkeypatch, "")
    monkeypatch.setattr(Keyboard, "readline", interrupt)
    before = filled.ledger.counts()
    code, out, err = command("reset", "--state", "failed")
    assert (code, out) == (1, "")
    assert err.endswith("oncely: stopped\n")
    assert filled.ledger.counts() == before


# ---- Words -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length_s", "said"),
    [
        (-1.0, "0 s"),
        (0.9, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (3_599.0, "59 min 59 s"),
        (3_605.0, "1 h"),
        (11_525.0, "3 h 12 min"),
        (90_061.0, "1 d 1 h"),
        (400 * 86_400.0, "400 d"),
    ],
)
def test_spans(length_s: float, said: str) -> None:
    """The two largest units that stand beside each other."""
    assert span(length_s) == said


def test_moments() -> None:
    """A point in time says how far off it is, and is one however far that be."""
    assert moment(0.0, 60.0) == "1970-01-01 00:00:00 UTC (1 min ago)"
    assert moment(60.0, 0.0) == "1970-01-01 00:01:00 UTC (in 1 min)"
    assert moment(1e15, 0.0).startswith("beyond the year 9999 (in ")


def test_shortened() -> None:
    """A long text is cut before it is written out."""
    assert shortened("a\n" * 3, 4) == "a\\na…"
    assert shortened("abcd", 4) == "abcd"
