"""The fronts: a batch that returns its report, a function for foreachBatch, a stream."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.streaming.listener import StreamingQueryListener
from tests.conditions import wait_until
from tests.spark import handlers
from tests.spark.conftest import drain

from oncely import (
    ConfigError,
    Ledger,
    Message,
    OncelyError,
    State,
    StoreUnavailable,
    open_ledger,
    ops,
)
from oncely.core.activity import Run
from oncely.locations import LedgerAddress
from oncely.spark import Report, StreamCounts, foreach_batch, process, sink_options
from oncely.spark.failures import as_own
from oncely.spark.format import OncelyWriter
from oncely.spark.ledgers import migrated_ledger
from oncely.spark.option_values import as_text
from oncely.spark.sink.sink_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter
    from tests.spark.conftest import Effects

Frame = Callable[..., "DataFrame"]
Settings = dict[str, Any]


@pytest.fixture
def settings(ledger_url: str, tmp_path: Path) -> Settings:
    """What a front is told, if a test wants nothing else."""
    return {
        "consumer": "tests",
        "ledger": ledger_url,
        "handler": handlers.work,
        "quarantine": str(tmp_path / "quarantine"),
    }


@pytest.fixture
def configure(spark: "SparkSession") -> Iterator[Callable[..., None]]:
    """Sets `spark.oncely.*` of the session until the test is over."""
    names = []

    def set_all(**values: str) -> None:
        for name, value in values.items():
            names.append(f"spark.oncely.{name}")
            spark.conf.set(names[-1], value)

    yield set_all
    for name in names:
        spark.conf.unset(name)


def stream(spark: "SparkSession", folder: Path, effects: "Effects") -> "DataFrame":
    """A stream of the JSON files in a folder, a batch for each."""
    return (
        spark.readStream.schema("id string, body string")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
        .selectExpr("id", "body", f"'{effects.path}' as source")
    )


def lines_of(folder: Path, *files: list[str]) -> Path:
    """The folder, with a file of messages for each list of ids."""
    folder.mkdir()
    for number, ids in enumerate(files):
        text = "".join(json.dumps({"id": id_}) + "\n" for id_ in ids)
        (folder / f"{number}.json").write_text(text)
    return folder


def test_any_thread_may_call(frame: Frame, settings: Settings) -> None:
    """Spark has a session for the thread that opened it; others have to be told."""
    messages = frame("m1", "m2", partitions=1)
    with ThreadPoolExecutor(1) as threads:
        report = threads.submit(process, messages, **settings).result()
    assert report.handled == 2


def test_a_batch_is_processed_once(frame: Frame, settings: Settings, effects: "Effects") -> None:
    """The report tells what became of every row; the same batch again is nothing but duplicates."""
    messages = frame(*(f"m{n}" for n in range(40)), "m1", "m2", None, partitions=3)
    report = process(messages, **settings)
    assert (report.received, report.handled, report.duplicates) == (43, 40, 2)
    assert (report.quarantined, report.failed, report.in_doubt) == (1, 0, 0)
    told = report.as_dict()
    assert told.pop("seconds") > 0
    assert told == {
        "received": 43,
        "handled": 40,
        "duplicates": {"input": 2, "ledger": 0},
        "quarantined": {"missing id": 1},
        "failed": 0,
        "in_doubt": 0,
        "waiting": 0,
        "errors": [],
    }
    again = process(messages, **settings)
    assert (again.handled, again.counts.duplicates_ledger, again.quarantined) == (0, 42, 1)
    assert set(effects.per_message().values()) == {1}


def test_retries_of_what_another_task_failed(
    frame: Frame, settings: Settings, ledger: Ledger
) -> None:
    """They count for their messages, which are counted: a task that begins later knows that."""
    failing = settings | {"handler": handlers.fail_slowly, "tries": 2, "backoff": "300ms"}
    report = process(frame(*(f"m{n}" for n in range(160))), partitions=16, **failing)
    assert report.received == 160 == report.failed + report.waiting
    assert report.waiting == len([*ledger.waiting(limit=1_000)])
    assert report.failed == len([*ledger.dead(limit=1_000)]) > 0
    [error] = report.as_dict()["errors"]
    assert (error["text"][:24], error["count"]) == ("ValueError: password=***", 160)


def kept_runs(settings: Settings) -> list[Run]:
    with closing(open_ledger(settings["ledger"])) as ledger:
        ledger.migrate()
        return [*ledger.operations.runs()]


def test_a_batch_is_a_run(frame: Frame, settings: Settings) -> None:
    """It is kept for operators and counted for its consumer; so is why it failed."""
    messages = frame(("a", '{"bad": true}'), ("b", "{}"), ("b", "{}"), (None, "{}"))
    process(messages, **settings | {"handler": handlers.fail_bad, "tries": 1})
    [run] = kept_runs(settings)
    assert (run.consumer, run.error, run.totals["received"]) == ("tests", None, 4)
    assert run.ended is not None
    others = sum(run.totals[name] for name in ("handled", "failed", "in_doubt", "waiting"))
    copies = sum(run.totals["duplicates"].values())
    assert others + copies + sum(run.totals["quarantined"].values()) == 4
    migrated_ledger(LedgerAddress(settings["ledger"])).recorder.tell()
    with closing(open_ledger(settings["ledger"])) as ledger:
        rates = ops.activity(ledger).day["tests"]
        assert (rates.handled, rates.failed_attempts, rates.duplicates) == (1, 1, 1)
        assert {each.worker.kind for each in ops.workers(ledger)} == {"spark"}
    with pytest.raises(OncelyError):
        process(messages, **settings | {"handler": handlers.fail_bad, "fail_if": "any"})
    failed, _ = kept_runs(settings)
    assert failed.error is not None


def test_copies_meet_in_one_task(frame: Frame, settings: Settings, effects: "Effects") -> None:
    """However the copies of an id are dealt out, one process gets them all."""
    ids = [f"m{n}" for n in range(30)]
    tries = settings | {"handler": handlers.fail_first, "backoff": ["0s"], "partitions": 2}
    report = process(frame(*ids, *ids, *ids, partitions=7), **tries)
    assert (report.handled, report.counts.duplicates_input) == (30, 60)
    assert len({line["pid"] for line in effects.lines()}) <= 2


def test_settings_of_the_session(
    frame: Frame,
    settings: Settings,
    configure: Callable[..., None],
    ledger: Ledger,
) -> None:
    """What is not told is the session's; what is told comes before it."""
    configure(consumer="sessions", tries="7", ledger="sqlite:////nowhere/at/all.db")
    left_out = {name: value for name, value in settings.items() if name != "consumer"}
    assert process(frame("a"), **left_out).handled == 1
    assert process(frame("a"), **settings).handled == 1
    assert ledger.counts() == {("sessions", State.COMPLETED): 1, ("tests", State.COMPLETED): 1}


def test_options_for_a_writer(spark: "SparkSession", configure: Callable[..., None]) -> None:
    """Values become the texts that Spark carries; another format's settings are left alone. Workers
    find installed functions without a folder.
    """
    assert as_text({"handler": pytest.main}) == {"handler": "_pytest.config:main"}
    configure(ledger="env:LEDGER_URL", on_busy="discard", **{"other.url": "secret"})
    told = sink_options(
        spark,
        handler=handlers.work,
        backoff=["5s", timedelta(minutes=2), 0.5],
        lease=60,
        tries=3,
        on_busy=None,
    )
    assert told == {
        "ledger": "env:LEDGER_URL",
        "on_busy": "discard",
        "handler": "tests.spark.handlers:work",
        "handler_path": str(Path(__file__).parents[2]),
        "backoff": "5s,120.0s,0.5s",
        "lease": "60s",
        "tries": "3",
    }


class Shop:
    def handle(self, message: Message) -> None:
        pass


def main_module_function() -> Callable[..., None]:
    """A function as a script has it."""

    def handle(message: Message) -> None:
        pass

    handle.__module__ = "__main__"
    handle.__qualname__ = "handle"
    return handle


@pytest.mark.parametrize(
    "function",
    [lambda message: None, Shop().handle, main_module_function()],
    ids=["lambda", "bound", "of a script"],
)
def test_functions_that_no_worker_can_import(function: Callable[..., None]) -> None:
    """They are refused before anything runs, in one line that says what to do."""
    with pytest.raises(ConfigError, match=r"^handler: .*top level of a module") as raised:
        foreach_batch(handler=function)
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"^on_in_doubt: .*top level of a module"):
        foreach_batch(on_in_doubt=function)


def test_frames_that_are_none_of_a_batch_of_messages(
    spark: "SparkSession", settings: Settings, tmp_path: Path, effects: "Effects"
) -> None:
    """A stream is refused by the driver, a DataFrame without ids by Spark's process that plans."""
    with pytest.raises(ConfigError, match="foreachBatch"):
        process(stream(spark, lines_of(tmp_path / "in", ["a"]), effects), **settings)
    with pytest.raises(ConfigError, match="no column 'id', only n"):
        process(spark.range(1).toDF("n"), **settings)


@pytest.mark.in_turn("long on Spark")
def test_spark_gives_up(frame: Frame, settings: Settings) -> None:
    """What is no mistake of the user is another error, and still one line."""
    unreachable = {"ledger": "postgresql://nobody@127.0.0.1:1/nothing"}
    with pytest.raises(StoreUnavailable, match=r"^post") as raised:
        process(frame("a"), **settings | unreachable)
    assert "\n" not in str(raised.value)
    given = {**sink_options(frame("a").sparkSession, **settings | unreachable), "lease": "1s"}
    writer = frame("a").write.format("oncely").options(**given).mode("append")
    # Who has not looked before waits as long as a lease lasts.
    with pytest.raises(PySparkException, match="StoreUnavailable: post"):
        writer.save()


def _refuse(id_: str) -> str:
    raise handlers.NoSuchAccount(f"no account {id_}")


def _leave(id_: str) -> str:
    os._exit(3)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (_refuse, "tests.spark.handlers.NoSuchAccount: no account a"),
        (_leave, "Python worker exited unexpectedly (crashed) (4 times, at last on "),
    ],
    ids=["raises", "ends its process"],
)
def test_what_happened_in_python_is_told(
    frame: Frame, settings: Settings, work: Callable[[str], str], said: str
) -> None:
    """Whatever an exception's class is called, and where a worker is gone."""
    # Without type hints, which would choose another kind of function.
    broken = frame("a").withColumn("id", f.udf(lambda id_: work(id_), "string")("id"))
    with pytest.raises(OncelyError) as raised:
        process(broken, **settings)
    assert str(raised.value).startswith(f"Spark gave up: {said}")
    assert "\n" not in str(raised.value)


# ---- Failures ----------------------------------------------------------------------------------

_BAD = '{"bad": true}'


def test_a_write_fails_where_its_messages_do(frame: Frame, settings: Settings) -> None:
    """As the option says: where all have failed, or any; duplicates are no part of that."""
    failing = settings | {"handler": handlers.fail_bad, "tries": 1}
    assert process(frame("a"), **failing, fail_if="any").handled == 1
    some = frame(("a", "{}"), ("b", _BAD), ("c", "{}"))
    report = process(some, **failing, fail_if="all")
    assert (report.handled, report.failed, report.has_failures) == (1, 1, True)
    with pytest.raises(OncelyError) as raised:
        process(frame(("a", "{}"), ("d", _BAD), None), **failing, fail_if="all")
    assert str(raised.value) == (
        "2 of 2 new messages were not handled: 1 failed, 1 quarantined; last error: message 'd': "
        'ValueError: password=*** is bad (option fail_if="all"); '
        "see: oncely list --consumer tests --state failed"
    )
    with pytest.raises(
        OncelyError, match=r"^1 of 2 new messages were not handled: 1 waiting for a retry"
    ):
        process(frame(("e", "{}"), ("f", _BAD)), **failing | {"tries": 3}, fail_if="any")
    assert process(frame(("g", _BAD)), **failing, fail_if="never").failed == 1


def test_a_stream_stops_where_too_many_fail(
    spark: "SparkSession", settings: Settings, effects: "Effects", tmp_path: Path, ledger: Ledger
) -> None:
    """And goes on from there when it is started again: what failed is known, and none is lost."""
    messages = stream(spark, lines_of(tmp_path / "in", ["a", "b", "c"]), effects)
    body = "if(id = 'a', '{}', '{\"bad\": true}') AS body"
    failing = settings | {"handler": handlers.fail_bad, "tries": 1, "max_failures": 0.5}

    def run(**options: Any) -> None:
        writer = messages.selectExpr("id", body, "source").writeStream.format("oncely")
        writer.options(**sink_options(spark, **failing | options))
        drain(writer, tmp_path / "checkpoint")

    with pytest.raises(PySparkException) as raised:
        run()
    said = str(as_own(raised.value))
    assert said.startswith(
        "2 of 3 messages failed, more than the share that option max_failures=0.5"
    )
    assert "last error: message '" in said
    assert ledger.counts() == {("tests", State.COMPLETED): 1, ("tests", State.FAILED): 2}
    # The batch comes again: it is known, no handler runs, and the stream gets past it.
    run()
    assert effects.per_message() == {"a": 1}


def test_streams_that_cannot_be_handled_once(
    spark: "SparkSession", settings: Settings, effects: "Effects", tmp_path: Path
) -> None:
    """All results again in each batch; or rows that no task is called with, as in the continuous
    mode, in which Spark only logs the error: no offset counts as processed.
    """
    rows = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    rows = rows.selectExpr("string(value) AS id", f"'{effects.path}' AS source")
    options = sink_options(spark, **settings)

    def writer_of(rows: "DataFrame", name: str) -> "DataStreamWriter":
        writer = rows.writeStream.format("oncely").options(**options)
        return writer.option("checkpointLocation", str(tmp_path / name))

    counted = rows.groupBy("id", "source").count().drop("count")
    with pytest.raises(PySparkException) as raised:
        writer_of(counted, "complete").outputMode("complete").start().awaitTermination(60)
    assert str(as_own(raised.value)).startswith("outputMode complete: each batch has all results")
    query = writer_of(rows, "continuous").trigger(continuous="100 milliseconds").start()
    wait_until((tmp_path / "continuous" / "offsets" / "3").exists)
    query.stop()
    assert not [*(tmp_path / "continuous").glob("commits/[0-9]*")]
    writer = OncelyWriter(read_options(options))
    said = "trigger continuous: no row is handled"
    with pytest.warns(RuntimeWarning, match=said), pytest.raises(ConfigError, match=said):
        writer.commit([None, None], 0)
    assert not effects.lines()


def test_partitions_of_files(
    frame: Frame, spark: "SparkSession", settings: Settings, effects: "Effects", tmp_path: Path
) -> None:
    """What docs/how-to/spark.md says of `partitionBy`, which is for files: Spark refuses a batch,
    and does not tell the sink of a stream, which handles each message once all the same.
    """
    options = sink_options(spark, **settings)
    batch = frame("a").write.format("oncely").options(**options).mode("append")
    with pytest.raises(PySparkException, match="provided partitioning or clustering columns do no"):
        batch.partitionBy("source").save()
    messages = stream(spark, lines_of(tmp_path / "in", ["a", "b", "a"]), effects)
    writer = messages.writeStream.format("oncely").options(**options)
    drain(writer.partitionBy("source"), tmp_path / "checkpoint")
    assert effects.per_message() == {"a": 1, "b": 1}


class Gauges(StreamingQueryListener):
    """What somebody's metrics are fed from."""

    def __init__(self, counts: StreamCounts) -> None:
        self._counts = counts
        self.told: list[tuple[int, int, int, int]] = []
        self.is_over = threading.Event()

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name.
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name.
        counts, progress = self._counts.committed(), event.progress
        told = (progress.batchId, progress.numInputRows, counts.handled, counts.failed)
        self.told.append(told)

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name.
        self.is_over.set()


def test_counts_for_a_listener(
    spark: "SparkSession", settings: Settings, effects: "Effects", tmp_path: Path
) -> None:
    """When a listener hears of a batch, what that came to is counted."""
    messages = stream(spark, lines_of(tmp_path / "in", ["a", "b"]), effects)
    bad = "if(id = 'b', '{\"bad\": true}', '{}') AS body"
    options = sink_options(spark, **settings | {"handler": handlers.fail_bad, "tries": 1})
    with StreamCounts(spark) as counts:
        gauges = Gauges(counts)
        spark.streams.addListener(gauges)
        try:
            writer = messages.selectExpr("id", bad, "source").writeStream.format("oncely")
            drain(writer.options(**options, **counts.options), tmp_path / "checkpoint")
            assert gauges.is_over.wait(60)
        finally:
            spark.streams.removeListener(gauges)
        assert gauges.told == [(0, 2, 1, 1)]
        assert counts.progress() == counts.committed()


def test_foreach_batch(
    spark: "SparkSession", settings: Settings, effects: "Effects", tmp_path: Path
) -> None:
    """Each batch has its report, and a query that lost its checkpoint repeats no effect."""
    with pytest.raises(ConfigError, match="handler: 'nowhere:f' cannot be imported"):
        foreach_batch(handler="nowhere:f")
    messages = stream(spark, lines_of(tmp_path / "in", ["a", "b"], ["b", "c"]), effects)
    reports: list[tuple[int, int, int]] = []

    def keep(report: Report, batch: int) -> None:
        reports.append((batch, report.handled, report.duplicates))

    for run in ("first", "again"):
        each = foreach_batch(**settings, on_report=keep)
        drain(messages.writeStream.foreachBatch(each), tmp_path / run)
    assert reports == [(0, 2, 0), (1, 1, 1), (0, 0, 2), (1, 0, 2)]
    assert effects.per_message() == {"a": 1, "b": 1, "c": 1}
    # A run for each query, not for each batch.
    again, first = kept_runs(settings)
    assert (first.totals["received"], first.totals["handled"]) == (4, 3)
    assert first.totals["duplicates"] == {"input": 0, "ledger": 1}
    assert (again.totals["received"], again.totals["handled"]) == (4, 0)
    assert None not in (first.ended, again.ended)
