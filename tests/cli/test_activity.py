"""`oncely activity`, `workers`, `runs`, `audit` and `settle`: what they print, and what they do."""

import json
import os
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.cli.conftest import Command, OnFile
from tests.records import record_of

from oncely import Key, State
from oncely.core.activity import AuditEntry, Run, Worker


def test_activity(at: OnFile, command: Command) -> None:
    """A row for each consumer and time; nothing where nothing was done."""
    assert command("activity")[1:] == ("", "no activity in the last day\n")
    at.complete("billing", "1")
    at.fail("billing", "2", final=True)
    at.ledger.recorder.tell()
    ran = command("activity")
    assert (ran.code, ran.err) == (0, "")
    over, header, _, hour, day = ran.out.splitlines()
    assert over.split() == ["failed", "in"]
    columns = ["handled", "duplicates", "attempts", "failed", "doubt", "p50", "p95"]
    assert header.split() == ["consumer", "last", *columns, "attempts"]
    assert hour.split()[:7] == ["billing", "hour", "1", "0", "1", "1", "0"]
    assert day.split()[:7] == ["billing", "day", "1", "0", "1", "1", "0"]
    told = json.loads(command("activity", "--json").out)
    assert told["hour"]["billing"]["handled"] == 1
    assert told["day"]["billing"]["p95_s"] > 0
    assert sum(point["failed_attempts"] for point in told["periods"]) == 1


def test_workers(at: OnFile, command: Command) -> None:
    """Those that live, and those that have been silent for too long, said so."""
    now = at.ledger.now()
    at.complete("billing", "1")
    at.ledger.recorder.works_as("consumer", "billing")
    at.ledger.recorder.tell()
    out = command("workers").out
    assert out.rstrip().endswith(" alive")
    assert out.splitlines()[2].split()[:2] == ["consumer", "billing"]
    [worker] = json.loads(command("workers", "--json").out)["workers"]
    assert (worker["kind"], worker["pid"], worker["is_alive"]) == ("consumer", os.getpid(), True)
    dead = Worker("x" * 32, "relay", "", "far", 7, "1", now, now, 0)
    at.ledger.operations.keep_worker(dead, [])
    with closing(sqlite3.connect(at.file)) as connection, connection:
        connection.execute("UPDATE message_workers SET seen = seen - 100 WHERE pid = 7")
    [line] = [line for line in command("workers").out.splitlines() if "relay" in line]
    assert re.search(r" gone since [-0-9: ]+ UTC$", line.rstrip())


def test_dead_worker(at: OnFile, command: Command) -> None:
    """A worker that is gone is seen by check until somebody says that it is dead, which ends its
    claims; what has changed since then, and one that lives, are refused, with the time.
    """
    for id_ in "123":
        at.claim("billing", id_)
    at.ledger.recorder.tell()
    name = f"{socket.gethostname()}:{os.getpid()}"
    alive = command("worker", "dead", name)
    assert (alive.code, alive.out) == (1, "")
    assert re.search(r" is alive: seen \d+ s ago; it is gone if it is not seen .* UTC", alive.err)
    assert command("worker", "dead", "nowhere:1").code == 2
    held = command("settle", "1", "--happened")
    assert (held.code, "'1' (billing) is processing (lease until 20" in held.err) == (1, True)
    assert command("settle", "1", "--happened", "--worker-is-dead").code == 1
    assert command("settle", "1", "--happened", "--worker-is-dead", "--yes").code == 0
    with closing(sqlite3.connect(at.file)) as connection, connection:
        connection.execute("UPDATE message_workers SET seen = seen - 100")
    found = command("check")
    assert f"{name} is gone since " in found.out + found.err
    assert (
        f", held 2 claims. If it is dead, type: oncely worker dead {name}" in found.out + found.err
    )
    told = json.loads(command("worker", "dead", name, "--why", "no power", "--json").out)
    assert [each["message_id"] for each in told["ended"]] == ["2", "3"]
    assert told["why"] == f"{name} is dead; no power"
    assert command("worker", "dead", name).out == f"{name} held no claims\n"
    [entry, *_] = json.loads(command("audit", "--json").out)["audit"]
    assert (entry["action"], entry["changed"], entry["why"]) == ("worker_dead", 2, told["why"])
    doubt = json.loads(command("list", "--state", "in-doubt", "--json").out)["records"]
    assert [(each["message_id"], each["claimed_by"]) for each in doubt] == [
        ("2", name),
        ("3", name),
    ]
    assert '"worker_dead": {"by": ' in command("show", "2").out


def test_runs(at: OnFile, command: Command) -> None:
    """The newest first, with what they counted, or why they failed."""
    assert command("runs")[1:] == ("", "no runs\n")
    totals = {"handled": 3, "duplicates": {"input": 1_200, "ledger": 1}, "in_doubt": 0}
    at.ledger.operations.keep_run(Run("1", "nightly", "billing", 10.0, 70.0, totals))
    at.ledger.operations.keep_run(Run("2", "nightly", "billing", 20.0, None, {}, "out of memory"))
    lines = command("runs").out.splitlines()
    assert re.search(r" killed +out of memory", lines[2])
    assert "handled 3, duplicates 1,201" in lines[3]
    assert "in doubt" not in lines[3]
    assert "60 s" in lines[3] or "1 min" in lines[3]
    told = json.loads(command("runs", "--json", "--limit", "1").out)["runs"]
    assert [(run["id"], run["error"]) for run in told] == [("2", "out of memory")]


_DONE = "; completed: nothing of it runs again\n"


def test_settle(at: OnFile, command: Command) -> None:
    """What is in doubt is listed with the steps that are done; it is completed, or runs again, as
    somebody says; the audit has both.
    """
    for id_ in ("1", "2"):
        at.claim("billing", id_)
    assert command("settle", "1", "--happened").code == 1
    at.age(1_000)
    found, _ = json.loads(command("list", "--state", "in-doubt", "--json").out)["records"]
    known = ("message_id", "steps", "unsent", "is_kept")
    assert [found[name] for name in known] == ["1", [], 0, False]
    ran = command("settle", "1", "--happened", "--by", "ann", "--why", "on the bill")
    assert ran == (0, f"settled '1' (billing) by ann: on the bill{_DONE}", "")
    ran = command("settle", "2", "--not-happened", "--by", "ann", "--json")
    settled = json.loads(ran.out)
    assert settled["settled"][0].pop("next").startswith("may run again; waits for its sender (")
    assert settled == {
        "settled": [{"consumer": "billing", "message_id": "2"}],
        "refused": [],
        "by": "ann",
        "why": "",
        "audit_error": None,
    }
    states = [at.ledger.find(Key("billing", id_)) for id_ in ("1", "2")]
    assert [record and record.state for record in states] == [State.COMPLETED, State.FAILED]
    ran = command("settle", "2", "--happened")
    assert ran.code == 1
    refused = "'2' (billing) is waiting for its sender: only a message in doubt can be settled"
    assert refused in ran.err
    told = json.loads(command("audit", "--json").out)["audit"]
    assert [(each["action"], each["changed"], each["refused"]) for each in told] == [
        ("settled_happened", 0, 1),
        ("settled_not_happened", 1, 0),
        ("settled_happened", 1, 0),
        ("settled_happened", 0, 1),
    ]
    lines = command("audit", "--limit", "2", "--before", "4").out.splitlines()
    assert len(lines) == 4
    assert " ".join(lines[3].split()[4:]) == "ann settled happened billing 1 1 0 on the bill"


def test_audit_begun(at: OnFile, command: Command) -> None:
    """What was killed before its counts is shown as such; in JSON the counts are null."""
    assert command("audit") == (0, "", "nobody has changed anything\n")
    begun = AuditEntry(0, 0.0, "ann", "purged", "", "", None, None, None, "full")
    at.ledger.operations.note(begun)
    [line] = command("audit").out.splitlines()[2:]
    assert "begun; how many were changed is not known  " in line
    assert line.split()[-2:] == ["-", "full"]
    [told] = json.loads(command("audit", "--json").out)["audit"]
    assert [told[name] for name in ("chosen", "changed", "refused")] == [None, None, None]


def test_no_audit_no_change(at: OnFile, command: Command) -> None:
    """Without the entry a command changes nothing; without the counts it says so."""
    at.fail("billing", "1", "away", final=True)
    refusing = "CREATE TRIGGER no BEFORE {} ON message_audit BEGIN SELECT RAISE(ABORT, 'full'); END"
    with closing(sqlite3.connect(at.file)) as connection:
        connection.execute(refusing.format("INSERT"))
        ran = command("reset", "1")
        assert ran.code == 1
        assert ran.out == ""
        [line] = ran.err.splitlines()
        assert "nothing was changed, as the audit cannot be written: " in line
        assert "full" in line
        assert "reset" not in (record_of(at.ledger, Key("billing", "1")).metadata or {})
        connection.execute("DROP TRIGGER no")
        connection.execute(refusing.format("UPDATE"))
    ran = command("reset", "1", "--json")
    assert ran.code == 0
    assert "full" in json.loads(ran.out)["audit_error"]
    assert "oncely: done, but the audit does not say how many were changed: " in ran.err


PROBES = """
def asked(message):
    if message.id == "3":
        raise OSError("no route")
    return {"1": "happened", "2": "not_happened"}[message.id]

async def later(message):
    return "happened"
"""


def test_settle_by_a_probe(
    at: OnFile, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe says what has happened, which is in the audit; one that fails decides nothing."""
    (tmp_path / "settling_probes.py").write_text(PROBES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for id_ in ("1", "2", "3"):
        at.claim("billing", id_)
    at.age(1_000)
    asked = ("--probe", "settling_probes:asked", "--by", "ann")
    assert command("settle", "1", *asked, "--why", "slow day") == (
        0,
        f"settled '1' (billing) by ann: probe: happened; slow day{_DONE}",
        "",
    )
    told = json.loads(command("settle", "2", *asked, "--json").out)
    assert [each["message_id"] for each in told["settled"]] == ["2"]
    assert (told["finding"], told["error"]) == ("not_happened", None)
    ran = command("settle", "3", *asked)
    assert (ran.code, ran.out) == (1, "")
    assert "oncely: the probe does not know: OSError: no route\n" in ran.err
    actions = [each["action"] for each in json.loads(command("audit", "--json").out)["audit"]]
    assert actions == ["probed", "settled_not_happened", "settled_happened"]
    for wrong in ("nothing", "settling_probes:none", "settling_probes:later"):
        assert command("settle", "3", "--probe", wrong).code == 2


def test_story(at: OnFile, command: Command) -> None:
    """What is known of a message, in the order of time, below its record."""
    at.fail("billing", "1", "away", final=True)
    assert command("reset", "1", "--by", "ann", "--why", "back").code == 0
    told = json.loads(command("show", "1", "--story", "--json").out)
    assert told["story"][0]["what"] == "first seen"
    assert {"retried", "last seen"} <= {each["what"] for each in told["story"]}
    out = command("show", "1", "--story").out
    assert "first seen" in out
    assert "by ann, why back" in out
    at.complete("billing", "1")
    assert command("retry", "1", "--by", "bob").code == 1
    assert re.search(r"retried: refused +by bob", command("show", "1", "--story").out)
    assert "story" not in json.loads(command("show", "1", "--json").out)
