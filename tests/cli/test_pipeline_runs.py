"""Whole runs of `oncely pipeline run`; those that are killed are processes of their own."""

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.cli.conftest import HANDLERS, Command, Project, Run, with_real_input
from tests.conditions import wait_until
from tests.turns import in_turn

from oncely import State, open_ledger, ops
from oncely._util.signals import told_to_stop

KILLS = int(os.environ.get("ONCELY_TEST_KILLS", "1"))


def wait_for_effects(project: Project, more: int, run: Run) -> None:
    """Return when `more` effects have happened; the run must not be over before."""
    wanted = project.effects().total() + more

    def have_happened() -> bool:
        if run.poll() is not None:
            out, err = run.communicate()
            pytest.fail(f"over before it could be stopped, with {run.returncode}\n{out}\n{err}")
        return project.effects().total() >= wanted

    wait_until(have_happened, limit_s=400)


def totals_of_runs(project: Project) -> list[Any]:
    """Of all runs that the ledger keeps, the newest first."""
    with closing(open_ledger(f"sqlite:///{project.folder}/out/ledger.db")) as ledger:
        return [run.totals for run in ledger.operations.runs()]


def kill(run: Run, *, all_of_it: bool) -> None:
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


@pytest.mark.in_turn("pipelines")
def test_a_run_its_repetition_and_a_lost_checkpoint(project: Project) -> None:
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
    with contextlib.closing(open_ledger(f"sqlite:///{project.folder}/out/ledger.db")) as ledger:
        runs, [rates] = ledger.operations.runs(), ops.activity(ledger).day.values()
        assert ledger.retentions() == {"tests": timedelta(days=30)}
    assert [run.totals["handled"] for run in runs] == [0, 1, 0, 400]
    assert all(run.ended is not None and run.error is None for run in runs)
    assert (rates.handled, rates.duplicates) == (401, 12 + 1 + 414)


@pytest.mark.usefixtures("spark")
def test_failures_end_with_one(project: Project, command: Command) -> None:
    """A run whose messages fail permanently says so in its table and its exit code; how many, if
    they are too many, with the last error and where to read more. A row that is no message is in
    the quarantine as it was read, with what the schema drops.
    """
    project.put("1.json", ["a"])
    row = '{"id": "", "dropped": 1.50}'
    (project.folder / "in" / "2.json").write_text(row)
    project.tables["pipeline"] |= {"handler": "handlers:fail", "max_failures": 0.5}
    project.tables["policy"] = {"tries": 1}
    ran = command("pipeline", "run", str(project.save()))
    assert ran.code == 1, ran.err
    assert ["failed", "1"] in [line.split() for line in ran.out.splitlines()]
    said = (
        "oncely: 1 of 1 messages failed, more than the share that option max_failures=0.5 allows; "
        "last error: message 'a': ValueError: never; see: oncely list --consumer tests"
    )
    assert said in ran.err
    assert "Traceback" not in ran.err
    [aside] = (project.folder / "out" / "quarantine").glob("*.parquet")
    assert pq.read_table(aside).column("row").to_pylist() == [row]
    # What has failed is known: the next run gets past it.
    again = command("pipeline", "run", str(project.file), "--json")
    assert (again.code, "max_failures" in again.err) == (1, False)
    assert json.loads(again.out)["errors"] == [{"text": "ValueError: never", "count": 1}]


@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize(
    ("table", "key", "value", "said"),
    [
        ("message", "type", "no_such_column", "no_such_column"),
        ("source", "schema", "int", "is not a list of columns"),
        ("source", "format", "jsn", "Failed to find the data source: jsn"),
        ("pipeline", "checkpoint", "nowhere://bucket/c", 'No FileSystem for scheme "nowhere"'),
    ],
)
def test_what_only_spark_can_tell_names_its_key(
    project: Project, table: str, key: str, value: str, said: str
) -> None:
    """A wrong expression, schema or checkpoint is said as the rest is, before any handler runs."""
    project.put("1.json", ["a"])
    project.tables[table][key] = value
    code, err = project.outcome()
    assert code == 2
    assert f"oncely: {project.file}: [{table}] {key}: " in err
    assert said in err
    assert "Traceback" not in err
    assert not project.effects()


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("on_in_doubt", in_turn("policy of killed runs", ["hold", "retry"]))
def test_killed_runs_lose_and_double_nothing(
    project: Project, on_in_doubt: str, record_property: Callable[[str, object], None]
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
        # What it has counted is kept now and then.
        wait_until(lambda: totals_of_runs(project)[0].get("handled"))
        kill(run, all_of_it=bool(kills % 2) != (on_in_doubt == "hold"))
    last = project.run()
    done = project.effects()
    ledger = open_ledger(f"sqlite:///{project.folder}/out/ledger.db")
    with closing(sqlite3.connect(project.folder / "out" / "ledger.db")) as connection, connection:
        connection.execute("UPDATE message_workers SET seen = seen - 100")
    assert [each.is_killed for each in ops.runs(ledger, 50)] == [False, *[True] * KILLS]
    counted = sum(each["handled"] for each in totals_of_runs(project))
    assert last["handled"] < counted <= sum(done.values())
    doubtful = {r.key.message_id for r in ledger.scan(state=State.PROCESSING, limit=len(ids))}
    if on_in_doubt == "hold":
        assert set(done.values()) == {1}
        assert set(ids) - set(done) <= doubtful
        assert last["in_doubt"] >= len(doubtful)
    else:
        assert set(done) == set(ids)
        assert not doubtful


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "trigger"),
    in_turn("signal to a run", [(signal.SIGTERM, "available_now"), (signal.SIGINT, "1s")]),
)
def test_a_stopped_run_leaves_no_claim(
    project: Project, number: signal.Signals, trigger: str
) -> None:
    """SIGTERM and SIGINT release what was not begun; the next run starts and ends it at once."""
    ids = [f"m{n:05}" for n in range(3_000)]
    project.put("1.json", ids)
    project.tables["pipeline"]["trigger"] = trigger
    run = project.start("--json", PAUSE_S="0.005")
    wait_for_effects(project, 150, run)
    run.send_signal(number)
    out, err = run.communicate(timeout=300)
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


@with_real_input
def test_real_input(project: Project) -> None:
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


# ---- What ends a run ---------------------------------------------------------------------------


@pytest.mark.usefixtures("spark")
def test_a_source_that_spark_lacks(project: Project) -> None:
    """Spark's own words for it, and no stack."""
    project.tables["source"] |= {"format": "avro"}
    code, err = project.outcome()
    assert code == 2
    said = err.splitlines()[-1]
    assert said.startswith(f"oncely: {project.file}: [source]: [AVRO_DATA_SOURCE_NOT_ENABLED] ")
    assert "Failed to find data source: avro" in said
    assert "SQLSTATE" not in said
    assert "Traceback" not in err


@pytest.mark.usefixtures("spark")
def test_the_traceback_is_printed_when_asked_for(project: Project) -> None:
    """Without that, the line says how to ask; with it Python's and Java's come below the line."""
    project.put("1.json", ["a"])
    project.tables["message"]["id"] = "if(id = 'a', raise_error('no id here'), id)"
    code, err = project.outcome()
    assert code == 1
    assert err.splitlines()[-1] == (
        "oncely: Spark gave up: [USER_RAISED_EXCEPTION] no id here"
        "; run with --verbose for the traceback"
    )
    code, err = project.outcome("--verbose")
    assert code == 1
    assert "oncely: Spark gave up: [USER_RAISED_EXCEPTION] no id here\n" in err
    assert "JVM stacktrace:\norg.apache.spark." in err


NO_TABLE = """
import sqlite3
from pathlib import Path


def leased(message):
    with sqlite3.connect(Path(__file__).with_name("app.db")) as connection:
        connection.execute("INSERT INTO orders VALUES (?)", (message.id,))


def transactional(message, session):
    session.connection().exec_driver_sql("INSERT INTO orders VALUES (?)", (message.id,))
"""


@pytest.mark.in_turn("pipelines")
@pytest.mark.parametrize("mode", in_turn("mode of a hopeless run", ["leased", "transactional"]))
def test_a_run_stops_early_where_all_fail_alike(
    project: Project, command: Command, mode: str, spark: object
) -> None:
    """Its handlers' table is missing: most messages keep their tries, and it says why, where the
    ledger keeps it, too. The next run takes the rest, and what is due.
    """
    (project.folder / "no_table.py").write_text(NO_TABLE)
    project.tables["pipeline"] |= {"handler": f"no_table:{mode}", "mode": mode}
    project.put("1.json", ids := [f"m{n:05}" for n in range(4_000)])
    ran = command("pipeline", "run", str(project.save()), "--json")
    *_, line = ran.err.splitlines()
    assert (ran.code, "stopped early, since " in line, "Traceback" in ran.err) == (1, True, False)
    told = json.loads(ran.out)
    [error] = told["errors"]
    assert "no such table: orders" in error["text"]
    assert told["received"] == told["waiting"] == error["count"] == project.settled(told) < 2_000
    with closing(open_ledger(f"sqlite:///{project.folder}/out/ledger.db")) as ledger:
        assert ledger.counts() == {("tests", State.FAILED): told["waiting"]}
        [(kept, is_killed)] = ops.runs(ledger, 5)
        assert line.startswith(f"oncely: {kept.error}")
        assert (kept.totals["waiting"], is_killed) == (told["waiting"], False)
        file = "app.db" if mode == "leased" else "out/ledger.db"
        with closing(sqlite3.connect(project.folder / file)) as connection:
            connection.execute("CREATE TABLE orders (id TEXT)")
        project.let_waiting_be_due()
        last = project.run()
        # A delivery that comes after the retry of its message is a duplicate.
        copies = last["duplicates"]["ledger"]
        assert (last["received"] - copies, last["handled"]) == (len(ids), len(ids))
        assert (last["waiting"], last["errors"]) == (0, [])
        rates = ops.activity(ledger).day["tests"]
        assert (rates.failed_attempts, rates.handled) == (told["waiting"], len(ids))


@pytest.mark.in_turn("pipelines")
@pytest.mark.usefixtures("spark")
def test_a_run_ends_where_the_store_refuses_for_good(project: Project) -> None:
    """One task is refused: the others are told to stop, and the line is the store's."""
    project.put("1.json", [f"m{number}" for number in range(40)])
    project.tables["pipeline"]["partitions"] = 2
    assert project.run()["handled"] == 40
    with closing(sqlite3.connect(project.folder / "out" / "ledger.db")) as connection, connection:
        connection.execute(
            "CREATE TRIGGER never BEFORE UPDATE ON processed_messages"
            " WHEN NEW.message_id = 'n0' AND NEW.status = 'sent'"
            " BEGIN SELECT RAISE(ABORT, 'not n0'); END"
        )
    (project.folder / "handlers.py").write_text(
        HANDLERS.replace("PAUSE_S)", "0 if message.id == 'n0' else 0.03)")
    )
    project.put("2.json", [f"n{number}" for number in range(20_000)])
    code, err = project.outcome()
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("oncely: sqlite")
    assert last.removesuffix("; run with --verbose for the traceback").endswith("not n0")
    effects = project.effects()
    assert set(effects.values()) == {1}
    assert len(effects) < 20_000


FAILING = """
import json
from pathlib import Path

import oncely

LOG = Path(__file__).with_name("effects.jsonl")


def work(message):
    if message.id.startswith("bad") and message.claim.attempts < 3:
        raise ValueError("not yet")
    if message.id == "never":
        raise ValueError("never")
    with LOG.open("a") as log:
        log.write(json.dumps({"id": message.id, "attempt": message.claim.attempts}) + "\\n")
"""


@pytest.fixture
def failing(project: Project) -> Project:
    """A pipeline whose handler fails twice with some messages."""
    (project.folder / "failing.py").write_text(FAILING)
    project.tables["pipeline"] |= {"handler": "failing:work"}
    return project


@pytest.mark.in_turn("pipelines")
def test_a_failure_holds_up_no_batch(failing: Project) -> None:
    """A run ends while a message waits; the next handles a new file at once, and what is due. A
    drain waits for what waits; what has failed at every try is a dead letter.
    """
    failing.tables["policy"] = {"tries": 3, "backoff": ["1h"]}
    failing.put("1.json", ["a", "bad", "b"])
    first = failing.run()
    assert (first["received"], first["handled"], first["waiting"]) == (3, 2, 1)
    failing.put("2.json", ["c", "d"])
    second = failing.run()
    assert (second["received"], second["handled"], second["waiting"]) == (2, 2, 0)
    failing.let_waiting_be_due()
    # What is due is tried once, and counted, also where nothing new has come.
    idle = failing.run()
    assert (idle["received"], idle["handled"], idle["waiting"]) == (1, 0, 1)
    assert idle["errors"] == [{"text": "ValueError: not yet", "count": 1}]
    failing.let_waiting_be_due()
    failing.tables["policy"] = {"tries": 3, "backoff": ["1s"]}
    failing.put("3.json", ["bad2", "e", "never"])
    third = failing.run("--drain")
    assert (third["handled"], third["waiting"], third["failed"]) == (3, 0, 1)
    assert failing.effects() == dict.fromkeys(["a", "b", "c", "d", "e", "bad", "bad2"], 1)
    with contextlib.closing(open_ledger(f"sqlite:///{failing.folder}/out/ledger.db")) as ledger:
        [letter] = ledger.dead()
        assert (letter.key.message_id, letter.message.body) == ("never", b"{}")
        assert "ValueError: never" in (letter.error or "")


@pytest.mark.in_turn("pipelines")
def test_what_waits_is_run_where_no_batch_comes(failing: Project) -> None:
    """A stream by an interval takes what is due also while nothing new arrives."""
    failing.tables["pipeline"] |= {"trigger": "500ms"}
    failing.tables["policy"] = {"tries": 3, "backoff": ["1s"]}
    failing.put("1.json", ["a", "bad"])

    def stop_it() -> None:
        wait_until(lambda: failing.effects().total() == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    # A run that ends too early has restored the handlers: the signal would end the tests.
    with told_to_stop(), ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(stop_it)
        report = failing.run()
        stopping.result()
    assert (report["received"], report["handled"], report["waiting"]) == (2, 2, 0)
