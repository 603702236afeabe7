"""Handlers run in a process of their own: its death is an attempt, and no end of a task."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text
from tests.conditions import wait_until
from tests.records import record_of
from tests.servers import Postgresql
from tests.spark.conftest import HERE

from oncely import Key, Ledger, State
from oncely.spark import process

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from tests.spark.conftest import Effects, Write

Frame = Callable[..., "DataFrame"]

BAD = '{"bad": true}'


@pytest.mark.parametrize("handler", ["kill_at_bad", "leave_at_bad"])
def test_a_message_that_kills_is_given_up(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger, handler: str
) -> None:
    """Each death is an attempt of the message, the others run once, and Spark sees none of it."""
    ids = [f"m{n:02}" for n in range(20)]
    messages = frame(*ids[:10], ("m09b", BAD), *ids[10:])
    counts = write(messages, handler, tries="3", backoff="0s")
    assert (counts.received, counts.handled, counts.failed) == (21, 20, 1)
    assert effects.per_message() == dict.fromkeys(ids, 1) | {"m09b": 3}
    [letter] = ledger.dead()
    assert letter.key == Key("tests", "m09b")
    how = "was killed by SIGKILL" if handler == "kill_at_bad" else "exited with 0"
    assert letter.error is not None
    assert f"HandlerDied: its process {how}" in letter.error


def test_hold_reports_who_killed(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """Its effect may have happened: it is in doubt at once, and not when its lease is over."""
    counts = write(frame("a", ("b", BAD), "c"), "kill_at_bad", on_in_doubt="hold", lease="1d")
    assert (counts.handled, counts.in_doubt) == (2, 1)
    assert effects.per_message() == {"a": 1, "b": 1, "c": 1}


@pytest.mark.in_turn("Spark is killed")
def test_many_that_kill(frame: Frame, write: "Write", effects: "Effects") -> None:
    """More than a task of Spark may fail."""
    bad = [(f"b{n}", BAD) for n in range(8)]
    counts = write(frame("a", *bad, "c"), "kill_at_bad", tries="1")
    assert (counts.handled, counts.failed) == (2, 8)
    assert set(effects.per_message().values()) == {1}


def test_in_a_transaction(
    spark: "SparkSession", write: "Write", ledger: Ledger, ledger_url: str
) -> None:
    """The database undoes what was written; the attempt counts all the same."""
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (name VARCHAR(255))"))
    rows = [(f"m{n}", BAD if n == 5 else "{}") for n in range(10)]
    messages = spark.createDataFrame(rows, "id string, body string").coalesce(1)
    options = {"mode": "transactional", "tries": "2", "backoff": "0s"}
    counts = write(messages, "book_and_kill_at_bad", **options)
    assert (counts.handled, counts.failed) == (9, 1)
    with engine.connect() as connection:
        names = connection.execute(text("SELECT name FROM effects")).scalars().all()
    assert sorted(names) == [f"m{n}" for n in range(10) if n != 5]
    record = record_of(ledger, Key("tests", "m5"))
    assert (record.state, record.attempts, record.exhausted) == (State.FAILED, 2, True)
    more = spark.createDataFrame([("n1", "{}"), ("n2", "{}")], "id string, body string")
    assert write(more.coalesce(1), "book_async", mode="transactional").handled == 2


@pytest.mark.parametrize("handler", ["meet", "meet_async"])
def test_several_at_a_time(frame: Frame, write: "Write", effects: "Effects", handler: str) -> None:
    """As many handlers of a task as `concurrency` says wait at the same time."""
    ids = [f"m{n}" for n in range(40)]
    # Each waits until eight are there.
    assert write(frame(*ids), handler, concurrency="8").handled == 40
    assert effects.per_message() == dict.fromkeys(ids, 1)


def test_what_spark_says_of_a_task(frame: Frame, write: "Write", effects: "Effects") -> None:
    """A handler asks TaskContext as it would in Spark's own process; one process has many tasks."""
    for number in range(3):
        ids = [f"{number}-{n}" for n in range(8)]
        assert write(frame(*ids, partitions=2), "tell_of_task").handled == 8
    lines = effects.lines()
    assert {line["partition"] for line in lines} == {0, 1}
    assert {line["attempt"] for line in lines} == {0}
    assert len({line["pid"] for line in lines}) <= 2 * len({line["worker"] for line in lines})
    assert len({line["pid"] for line in lines}) < 6
    assert all(line["worker"] != os.getpid() for line in lines)


def _stream(spark: "SparkSession", folder: Path, name: str, **options: str) -> "StreamingQuery":
    rows = spark.readStream.schema("id string, body string, source string").json(str(folder / "in"))
    given = {"consumer": "tests", "handler_path": str(HERE), "quarantine": str(folder / "aside")}
    return (
        rows.coalesce(1)
        .writeStream.format("oncely")
        .options(**given | options)
        .option("checkpointLocation", str(folder / name))
        .trigger(availableNow=True)
        .start()
    )


def _publish(effects: "Effects", ids: list[str]) -> None:
    folder = effects.path.parent / "in"
    folder.mkdir()
    rows = [{"id": id_, "body": "{}", "source": str(effects.path)} for id_ in ids]
    (folder / "rows.json").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.in_turn("long on Spark")
def test_a_query_that_is_stopped_gives_back(
    spark: "SparkSession", effects: "Effects", tmp_path: Path, ledger_url: str
) -> None:
    """What it had claimed and not begun is free: nobody waits for its lease of a day."""
    ids = [f"m{n:03}" for n in range(60)]
    _publish(effects, ids)
    options = {"ledger": ledger_url, "lease": "1d"}
    query = _stream(spark, tmp_path, "first", handler="handlers:sleep_a_while", **options)
    wait_until(lambda: len(effects.lines()) >= 3)
    query.stop()
    assert len(effects.lines()) < len(ids)
    again = _stream(spark, tmp_path, "second", handler="handlers:work", **options)
    assert again.awaitTermination(240)
    assert effects.per_message() == dict.fromkeys(ids, 1)


AWAY_S = float(os.environ.get("ONCELY_TEST_OUTAGE_S", "2"))
"""How long an outage lasts: nobody can be seen to wait for it."""


def _be_away(server: Postgresql) -> None:
    server.stop()
    time.sleep(AWAY_S)
    server.start()


@pytest.mark.in_turn("Spark is killed")
@pytest.mark.timeout(300 + 4 * int(AWAY_S))
def test_a_ledger_that_is_away_is_waited_for(
    spark: "SparkSession", effects: "Effects", tmp_path: Path, private_postgresql: Postgresql
) -> None:
    """It delays a stream and a batch, and ends neither: every message has one effect."""
    ids = [f"m{n:02}" for n in range(40)]
    _publish(effects, ids)
    server = private_postgresql
    options: dict[str, Any] = {"ledger": server.url, "lease": "5m", "chunk": "5"}
    query = _stream(spark, tmp_path, "checkpoint", handler="handlers:very_slowly", **options)
    wait_until(lambda: len(effects.lines()) >= 3)
    _be_away(server)
    assert query.awaitTermination(240)
    assert effects.per_message() == dict.fromkeys(ids, 1)
    batch = spark.read.schema("id string, body string, source string").json(str(tmp_path / "in"))
    messages = batch.selectExpr("concat('b', id) AS id", "body", "source").coalesce(1)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(
            process,
            messages,
            consumer="tests",
            handler="handlers:very_slowly",
            handler_path=HERE,
            partitions=1,
            quarantine=str(tmp_path / "aside"),
            **options,
        )
        wait_until(lambda: len(effects.lines()) >= len(ids) + 3)
        _be_away(server)
        assert done.result(240).handled == len(ids)
    assert effects.per_message() == dict.fromkeys([*ids, *(f"b{id_}" for id_ in ids)], 1)
