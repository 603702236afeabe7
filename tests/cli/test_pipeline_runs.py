"""Whole runs of `oncely pipeline run`, in processes of their own."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import with_real_input

from oncely import State, open_ledger

if TYPE_CHECKING:
    from tests.cli.conftest import Command, Main, Project, Run

KILLS = int(os.environ.get("ONCELY_TEST_KILLS", "1"))


def wait_for_effects(project: "Project", more: int, run: "Run") -> None:
    """Return when `more` effects have happened; the run must not be over before."""
    wanted = project.effects().total() + more
    deadline = time.monotonic() + 120
    while project.effects().total() < wanted and time.monotonic() < deadline:
        if run.poll() is not None:
            out, err = run.communicate()
            pytest.fail(f"over before it could be stopped, with {run.returncode}\n{out}\n{err}")
        time.sleep(0.02)


def kill(run: "Run", *, all_of_it: bool) -> None:
    """SIGKILL to the driver alone, whose workers then find out, or to all processes of the run."""
    pids = [run.pid]
    if all_of_it:
        # Spark's Python workers have a process group of their own, but share the session.
        everything = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        pids += [pid for pid in everything if _session_of(pid) == run.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.communicate()


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def test_a_run_its_repetition_and_a_lost_checkpoint(project: "Project") -> None:
    """What was handled is handled no more, neither with the checkpoint nor without it."""
    project.put("1.json", [f"m{n}" for n in range(300)] + ["m1", "m2", ""])
    project.put("2.json", [f"m{n}" for n in range(290, 400)])
    first = project.run()
    assert first["handled"] == 400
    assert first["duplicates"] == {"input": 12, "ledger": 0}
    assert first["quarantined"] == {"empty id": 1}
    assert project.run()["received"] == 0
    project.put("3.json", ["m5", "m500"])
    # Files that are moved in keep their time; Spark would pass over those of last week.
    last_month = time.time() - 30 * 86_400
    os.utime(project.folder / "in" / "3.json", (last_month, last_month))
    third = project.run()
    assert (third["handled"], third["duplicates"]) == (1, {"input": 0, "ledger": 1})
    shutil.rmtree(project.folder / "out" / "checkpoint")
    lost = project.run()
    assert (lost["handled"], lost["duplicates"]) == (0, {"input": 0, "ledger": 414})
    assert set(project.effects().values()) == {1}
    assert len(project.effects()) == 401


@pytest.mark.usefixtures("spark")
def test_failures_end_with_one(project: "Project", command: "Command") -> None:
    """A run whose messages fail permanently says so in its table and its exit code."""
    project.put("1.json", ["a", "b"])
    project.tables["pipeline"]["handler"] = "handlers:fail"
    project.tables["policy"] = {"tries": 1}
    ran = command("pipeline", "run", str(project.save()))
    assert ran.code == 1, ran.err
    assert "failed" in ran.out
    assert "Traceback" not in ran.err


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("table", "key", "value", "said"),
    [
        ("message", "type", "no_such_column", "no_such_column"),
        ("source", "schema", "int", "is no list of columns"),
    ],
)
def test_what_only_spark_can_tell_names_its_key(
    project: "Project", main: "Main", table: str, key: str, value: str, said: str
) -> None:
    """A wrong expression or schema is said in the same way as the rest."""
    project.put("1.json", ["a"])
    project.tables[table][key] = value
    code, err = main("pipeline", "run", str(project.save()))
    assert code == 2
    assert f"oncely: {project.file}: [{table}] {key}: " in err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.timeout(900)
@pytest.mark.parametrize("on_in_doubt", ["hold", "retry"])
def test_killed_runs_lose_and_double_nothing(
    project: "Project", on_in_doubt: str, record_property: Callable[[str, object], None]
) -> None:
    """SIGKILL at random moments: one effect or in doubt (`hold`), at least one (`retry`)."""
    seed = random.randrange(2**32)
    record_property("seed", seed)
    draw = random.Random(seed)
    project.tables["policy"] = {"on_in_doubt": on_in_doubt, "lease": "2s", "tries": 1_000}
    # Enough for the effects of each run and for what its kill leaves in doubt: two claimed chunks.
    ids = [f"m{n:05}" for n in range(KILLS * 2_000)]
    for n in range(4):
        project.put(f"{n}.json", ids[n::4] + ids[n:400:8])
    for kills in range(KILLS):
        run = project.start("--json", PAUSE_S="0.002")
        wait_for_effects(project, draw.randrange(600), run)
        kill(run, all_of_it=bool(kills % 2) != (on_in_doubt == "hold"))
    last = project.run()
    done = project.effects()
    ledger = open_ledger(f"sqlite:///{project.folder}/out/ledger.db")
    doubtful = {r.key.message_id for r in ledger.scan(state=State.PROCESSING, limit=len(ids))}
    if on_in_doubt == "hold":
        assert set(done.values()) == {1}
        assert set(ids) - set(done) <= doubtful
        assert last["in_doubt"] >= len(doubtful)
    else:
        assert set(done) == set(ids)
        assert not doubtful


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "trigger"), [(signal.SIGTERM, "available_now"), (signal.SIGINT, "1s")]
)
def test_a_stopped_run_leaves_no_claim(
    project: "Project", number: signal.Signals, trigger: str
) -> None:
    """SIGTERM and SIGINT release what was not begun; the next run starts and ends it at once."""
    ids = [f"m{n:05}" for n in range(3_000)]
    project.put("1.json", ids)
    project.tables["pipeline"]["trigger"] = trigger
    run = project.start("--json", PAUSE_S="0.005")
    wait_for_effects(project, 150, run)
    run.send_signal(number)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    assert "stopped" in err
    report = json.loads(out)
    assert report["received"] == project.settled(report)
    ledger = open_ledger(f"sqlite:///{project.folder}/out/ledger.db")
    assert set(ledger.counts()) == {("tests", State.COMPLETED)}
    assert 0 < len(project.effects()) < len(ids)
    project.tables["pipeline"]["trigger"] = "available_now"
    assert project.run()["in_doubt"] == 0
    assert project.effects() == dict.fromkeys(ids, 1)


def test_a_backfill_into_a_new_ledger(project: "Project") -> None:
    """Messages of last year are handled, all of them: a ledger that has forgotten nothing refuses
    none for its age. Once it has purged them, they are too old.
    """
    ids = [f"m{n}" for n in range(50)]
    project.put("1.json", ids)
    project.tables["message"]["time"] = "timestamp'2020-03-01'"
    first = project.run()
    assert (first["handled"], first["quarantined"]) == (50, {})
    ledger = open_ledger(f"sqlite:///{project.folder}/out/ledger.db")
    assert ledger.retentions() == {"tests": timedelta(days=30)}
    assert ledger.purge("0s") == 50
    ledger.close()
    shutil.rmtree(project.folder / "out" / "checkpoint")
    again = project.run()
    [reason] = again["quarantined"]
    assert reason.startswith("too old: sent before ")
    assert (again["handled"], again["quarantined"][reason]) == (0, 50)
    assert project.effects() == dict.fromkeys(ids, 1)


@with_real_input
def test_real_input(project: "Project") -> None:
    """Real webhook deliveries come to exactly the counts that were found in them independently."""
    expected = project.read_real_input()
    project.tables["message"] |= {"type": "event", "time": "delivered_at"}
    report = project.run()
    assert report["received"] == expected["rows"]
    assert report["handled"] == expected["unique"]
    assert report["duplicates"] == {"input": expected["duplicates"], "ledger": 0}
    assert report["quarantined"] == expected["broken"]
    assert (report["failed"], report["in_doubt"]) == (0, 0)
    reasons = [
        row["reason"]
        for file in (project.folder / "out" / "quarantine").glob("*.parquet")
        for row in pq.read_table(file).to_pylist()
    ]
    assert {reason: reasons.count(reason) for reason in set(reasons)} == expected["broken"]
    assert set(project.effects().values()) == {1}
