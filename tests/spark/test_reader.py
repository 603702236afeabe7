"""The ledger as a DataFrame."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from tests.records import record_of

from oncely import ConfigError, Granted, Key, Ledger
from oncely.ops import record_as_dict
from oncely.spark.reader import read_reader_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
_COMPLETED, _FAILED, _OTHERS = 1_200, 40, 300


def fill(ledger: Ledger) -> None:
    """Records of two consumers; some of the one have failed."""
    ledger.migrate()
    complete(ledger, [Key("tests", f"done-{number}") for number in range(_COMPLETED)])
    complete(ledger, [Key("others", f"done-{number}") for number in range(_OTHERS)])
    outcomes = ledger.claim_many([Key("tests", f"bad-{number}") for number in range(_FAILED)])
    claims = [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]
    ledger.fail_many(claims, [ValueError("no é")] * len(claims))


def complete(ledger: Ledger, keys: list[Key]) -> None:
    outcomes = ledger.claim_many(keys)
    claims = [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]
    ledger.complete_many(claims, [{"n": 1}] * len(claims))


@pytest.fixture
def full(ledger: Ledger) -> Ledger:
    fill(ledger)
    return ledger


@pytest.fixture
def pushdown(spark: "SparkSession") -> Iterator[None]:
    """Spark hands its filters to sources in Python."""
    spark.conf.set(_PUSHDOWN, "true")
    yield
    spark.conf.unset(_PUSHDOWN)


def read(spark: "SparkSession", url: str, **options: str) -> "DataFrame":
    return spark.read.format("oncely").options(ledger=url, **options).load()


def read_rows(frame: "DataFrame") -> tuple[int, int]:
    """How many rows a query gives, and how many the store gave for it."""
    plan = frame._jdf.queryExecution().executedPlan()
    count = len(frame.collect())
    [scan] = (plan.collectLeaves().apply(n) for n in range(plan.collectLeaves().size()))
    return count, scan.metrics().get("numOutputRows").get().value()


def test_every_field_of_every_record(spark: "SparkSession", full: Ledger, ledger_url: str) -> None:
    """The DataFrame holds what `oncely list --json` shows, each record once, from many tasks."""
    frame = read(spark, ledger_url, partitions="3")
    assert frame.rdd.getNumPartitions() == 3
    rows = frame.collect()
    assert len(rows) == _COMPLETED + _FAILED + _OTHERS
    found = {(row.consumer, row.message_id): row.asDict() for row in rows}
    for key in (Key("tests", "bad-7"), Key("others", "done-7")):
        expected = record_as_dict(record_of(full, key), full.now())
        actual: dict[str, Any] = found[key]
        for name in ("first_seen", "last_seen"):
            moment = actual.pop(name).replace(tzinfo=UTC).timestamp()
            assert moment == pytest.approx(expected.pop(name), abs=1e-6)
        metadata = '{"error": "ValueError: no \\u00e9"}' if expected["metadata"] else None
        result = '{"n": 1}' if expected["result"] else None
        assert actual == expected | {"metadata": metadata, "result": result}
    assert found["tests", "bad-7"]["error"] == "ValueError: no é"


def test_options_reach_the_store(spark: "SparkSession", full: Ledger, ledger_url: str) -> None:
    """What `consumer` and `state` leave out is not read."""
    frame = read(spark, ledger_url, consumer="tests", state="failed")
    assert read_rows(frame) == (_FAILED, _FAILED)
    ago = datetime.fromtimestamp(full.now() - 3_600, UTC).isoformat()
    frame = read(spark, ledger_url, consumer="tests", state="failed", seen_from=ago)
    assert read_rows(frame) == (_FAILED, _FAILED)
    assert read_rows(read(spark, ledger_url, seen_before=ago)) == (0, 0)


@pytest.mark.usefixtures("full")
def test_options_are_conditions(ledger_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The database filters by each of them, and not who reads."""
    caplog.set_level("INFO", "sqlalchemy.engine")
    given = {"ledger": ledger_url, "consumer": "tests", "state": "failed"}
    reader = read_reader_options({**given, "seen_from": "2026-01-01", "seen_before": "2999-01-01"})
    assert [*reader.read(reader.partitions()[0])]
    where = caplog.text.rpartition("WHERE")[2]
    for condition in ("provider IN", "status IN", "last_processed_at >=", "last_processed_at <"):
        assert condition in where


@pytest.mark.usefixtures("pushdown", "full")
def test_a_frame_that_is_used_twice(spark: "SparkSession", ledger_url: str) -> None:
    """No filters are taken: Spark would read by those of the first query ever after."""
    frame = read(spark, ledger_url)
    assert frame.where("state = 'failed'").count() == _FAILED
    assert frame.count() == _COMPLETED + _FAILED + _OTHERS


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, 'option ledger: missing; write .option("ledger", "sqlite:////var/lib/ledger.db")'),
        ({"ledger": "sqlite:////x.db", "partition": "2"}, "did you mean 'partitions'?"),
        ({"ledger": "sqlite:////x.db", "push_filters": "true"}, "there is no such key"),
        ({"ledger": "sqlite:////x.db", "state": "done"}, "option state: 'done' is not offered"),
        (
            {"ledger": "sqlite:////x.db", "seen_from": "now"},
            "option seen_from: 'now' is not a time",
        ),
        ({"ledger": "sqlite:////x.db", "partitions": "0"}, "not a whole number of 1 or more"),
        ({"ledger": "sqlite:////x.db", "table": "t"}, "option table: there is no such"),
        ({"ledger": "memory://"}, "is seen by one process only"),
    ],
)
def test_mistakes(options: dict[str, str], told: str) -> None:
    """A wrong option is told in one line."""
    with pytest.raises(ConfigError) as raised:
        read_reader_options(options)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_ledger_that_is_not_there(spark: "SparkSession", tmp_path: Path) -> None:
    """To read a file that is not there says so, and makes none."""
    with pytest.raises(PySparkException, match=r"ledger: there is no file '.*/mistyped\.db'"):
        read(spark, f"sqlite:///{tmp_path}/mistyped.db").collect()
    assert not (tmp_path / "mistyped.db").exists()
