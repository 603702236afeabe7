"""The sink, written to as users write to it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from tests.conditions import wait_until
from tests.records import granted, record_of
from tests.spark.conftest import HERE

from oncely import ConfigError, Granted, Key, Ledger, Policy, State
from oncely.core.commands import Outcome
from oncely.spark.sink.sink_options import read_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Effects, Write

Frame = Callable[..., "DataFrame"]


def set_aside(folder: Path) -> list[dict[str, Any]]:
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_what_is_no_message_is_set_aside(
    frame: Frame, write: "Write", effects: "Effects", tmp_path: Path
) -> None:
    """Rows without a usable id go to the quarantine with their reason; the others go on."""
    counts = write(frame(None, "", " ", "x" * 256, "a\0b", "good"))
    assert counts.quarantined == {
        "missing id": 1,
        "empty id": 2,
        "too long id": 1,
        "id with NUL": 1,
    }
    assert (counts.handled, counts.settled) == (1, counts.received)
    rows = set_aside(tmp_path / "quarantine")
    assert sorted(row["reason"] for row in rows) == sorted(counts.quarantined.elements())
    assert {row["id"] for row in rows} >= {None, "", "x" * 256}
    assert all(str(effects.path) in row["row"] for row in rows)


def test_a_handler_in_an_archive_of_the_session(
    spark: "SparkSession", frame: Frame, write: "Write", effects: "Effects", tmp_path: Path
) -> None:
    """As with `--py-files`, though Spark finds the format by itself."""
    with ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.write(HERE / "handlers.py", "zipped_handlers.py")
    spark.sparkContext.addPyFile(str(tmp_path / "zipped.zip"))
    assert write(frame("a", "b"), handler="zipped_handlers:work", handler_path="").handled == 2
    assert effects.per_message() == {"a": 1, "b": 1}


@pytest.mark.parametrize("large", ["false", "true"])
def test_a_session_with_settings_of_its_own(
    spark: "SparkSession", write: "Write", effects: "Effects", large: str
) -> None:
    """A zone that only Java knows, Arrow's large types, and headers without a value."""
    rows = spark.range(4).selectExpr(
        "concat('m', id) AS id",
        f"'{effects.path}' AS source",
        "timestamp_seconds(86400 + id) AS time",
        "map('a', '1', 'b', cast(null AS STRING)) AS headers",
        "if(id = 3, cast(X'ff' AS STRING), '{}') AS body",
    )
    settings = {
        "spark.sql.session.timeZone": "UTC+3",
        "spark.sql.execution.arrow.useLargeVarTypes": large,
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        counts = write(rows, "describe")
    finally:
        for name in settings:
            spark.conf.unset(name)
    assert (counts.handled, counts.quarantined, counts.failed) == (4, {}, 0)
    assert sorted(effects.lines(), key=lambda line: str(line["id"]))[1:] == [
        {"id": "m1", "time": 86401.0, "headers": {"a": "1"}, "body": "7b7d"},
        {"id": "m2", "time": 86402.0, "headers": {"a": "1"}, "body": "7b7d"},
        {"id": "m3", "time": 86403.0, "headers": {"a": "1"}, "body": "ff"},
    ]


def test_rejected_messages_are_set_aside_every_time(
    frame: Frame, write: "Write", ledger: Ledger, tmp_path: Path
) -> None:
    """What a handler rejects is quarantined with its reason, and again when it comes again."""
    messages = frame(("a", '{"bad": true}'), ("b", "{}"), ("c", "no json"))
    first, again = write(messages, "reject_bad"), write(messages, "reject_bad")
    reasons = {"nobody to send to": 1, "body is not JSON": 1}
    assert (first.handled, first.quarantined) == (1, reasons)
    assert (again.handled, again.duplicates_ledger, again.quarantined) == (0, 1, reasons)
    record = record_of(ledger, Key("tests", "a"))
    assert (record.state, record.exhausted, record.attempts) == (State.FAILED, True, 1)
    assert len(set_aside(tmp_path / "quarantine")) == 4


def test_another_body_under_a_known_id(frame: Frame, write: "Write", effects: "Effects") -> None:
    """The same id with another body is set aside, in one input and later."""
    first = write(frame(("a", "1"), ("a", "2")))
    again = write(frame(("a", "3")))
    assert (first.handled, first.quarantined.total()) == (1, 1)
    assert next(iter(again.quarantined)).startswith("mismatch")
    assert write(frame(("a", "3")), on_mismatch="ignore").duplicates_ledger == 1
    assert effects.per_message() == {"a": 1}


def test_a_probe_decides_what_is_in_doubt(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """It completes the message, or runs it; one that fails or does not know leaves the doubt."""
    findings = ("happened", "not_happened", "unknown", "no answer")
    for id_ in findings:
        granted(ledger.claim(Key("tests", id_), "500ms"))
    messages = frame("new", *((id_, f'{{"finding": "{id_}"}}') for id_ in findings))
    counts = write(messages, on_in_doubt="handlers:happened")
    assert (counts.handled, counts.duplicates_ledger, counts.in_doubt) == (2, 1, 2)
    assert effects.per_message() == {"not_happened": 1, "new": 1}


@pytest.mark.parametrize(
    ("function", "options", "failed"),
    [("retry_oddly", {}, 1), ("keep_nan", {"results": "keep"}, 0)],
)
def test_a_bad_message_keeps_no_other_from_being_stored(
    frame: Frame,
    write: "Write",
    effects: "Effects",
    function: str,
    options: dict[str, str],
    failed: int,
) -> None:
    """What goes wrong with one message of a chunk is that message's failure alone; a result that
    cannot be kept is none.
    """
    messages = frame(("a", '{"bad": true}'), "b", "c")
    counts = write(messages, function, tries="1", **options)
    assert (counts.handled, counts.failed) == (3 - failed, failed)
    assert (effects.per_message()["b"], effects.per_message()["c"]) == (1, 1)


def test_a_full_quarantine_keeps_no_other_from_being_stored(
    frame: Frame, write: "Write", ledger: Ledger, tmp_path: Path
) -> None:
    """The task fails, but what was done is completed."""
    with pytest.raises(PySparkException, match="quarantine"):
        write(frame(("a", '{"bad": true}'), "b", "c"), "spoil_and_reject_bad")
    assert (tmp_path / "quarantine").is_file()
    assert ledger.counts() == {("tests", State.COMPLETED): 2, ("tests", State.FAILED): 1}


def test_values_that_python_cannot_hold(
    write: "Write", spark: "SparkSession", effects: "Effects"
) -> None:
    """Ids and headers that are not text and times beyond year 9999 are set aside, not bodies."""
    text, source = "cast(X'FF41' as string)", f"'{effects.path}' as source"
    rows = [
        (text, "'{}'", "null", "null"),
        ("'a'", "'{}'", "timestamp_seconds(1e12)", "map('h', 'x')"),
        ("'b'", "'{}'", "null", f"map('h', {text})"),
        ("'c'", text, "null", "null"),
    ]
    selects = [
        f"select {id_} as id, {body} as body, {time} as time, {headers} as headers, {source}"
        for id_, body, time, headers in rows
    ]
    counts = write(spark.sql(" union all ".join(selects)))
    reasons = ["id with a lone surrogate", "unreadable time", "unreadable headers"]
    assert counts.quarantined == dict.fromkeys(reasons, 1)
    assert effects.per_message() == {"c": 1}


def test_a_slow_chunk_is_stored_as_it_goes(
    frame: Frame, write: "Write", ledger: Ledger, tmp_path: Path
) -> None:
    """What a long chunk has done is completed before the chunk is through."""

    def look() -> None:
        try:
            wait_until(lambda: ("tests", State.COMPLETED) in ledger.counts())
            assert ("tests", State.PROCESSING) in ledger.counts()
        finally:
            (tmp_path / "go").touch()

    messages = frame(*(f"m{n}" for n in range(100)), ("the last", '{"bad": true}'))
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        write(messages, "very_slowly_and_wait_at_bad")
        looking.result()


def test_a_claim_without_end_is_not_waited_for_for_ever(
    frame: Frame, write: "Write", ledger: Ledger
) -> None:
    """A claim that never runs out is in doubt after one lease of waiting."""
    granted(ledger.claim(Key("tests", "a"), "none"))
    assert write(frame("a"), lease="1s").in_doubt == 1


def test_a_long_handler_keeps_its_claims(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger, tmp_path: Path
) -> None:
    """The heartbeat extends the claims of a chunk for as long as the handler runs."""

    def lease_until() -> float:
        record = ledger.find(Key("tests", "a"))
        return 0.0 if record is None else record.lease_until or 0.0

    def try_to_take_over() -> Outcome:
        try:
            wait_until(effects.lines)
            first = lease_until()
            wait_until(lambda: lease_until() > ledger.now() > first)
            return ledger.claim(Key("tests", "a"), policy=Policy())
        finally:
            (tmp_path / "go").touch()

    with ThreadPoolExecutor(1) as pool:
        rival = pool.submit(try_to_take_over)
        counts = write(frame("a"), "wait_for_go", lease="3s")
        assert not isinstance(rival.result(), Granted)
    assert counts.handled == 1


_ROWS = {"mode": "rows", "handler": "", "table": "t"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"consumer": ""}, "option consumer: missing"),
        ({"consumer": "a" * 241}, "consumer: .* write a shorter name"),
        ({"ledger": "memory://"}, "is seen by one process only"),
        ({"ledger": "redis://h", "mode": "transactional"}, 'no transactions.*mode "leased"'),
        ({"tries": "many"}, "tries: 'many' is not a whole number"),
        ({"tires": "3"}, "tires: there is no such key; did you mean 'tries'?"),
        ({"mode": "leashed"}, "option mode: 'leashed' is not offered"),
        ({**_ROWS, "archive": "/a"}, "option archive: "),
        ({**_ROWS, "table": ""}, "option table: missing"),
        ({**_ROWS, "table": "a.b.c"}, "option table: 'a.b.c' names no table"),
        ({**_ROWS, "table": "payments; DROP TABLE x"}, "names no table"),
        ({**_ROWS, "on_in_doubt": "tests.spark.tasks:probe"}, 'on_in_doubt: mode "rows"'),
        ({**_ROWS, "sequence_by": "day"}, 'sequence_by: .*name the key by .option."upsert"'),
        ({"table": "t"}, 'option table: mode "leased" writes no'),
        ({"lease": "0s"}, "a lease of zero"),
        ({"on_outage": "run"}, "on_outage: on Spark it is always 'pause'"),
    ],
)
def test_wrong_options_say_so(options: dict[str, str], said: str) -> None:
    """In one line that names the option."""
    given = {"consumer": "tests", "ledger": "sqlite:///unused.db", "handler": "handlers:work"}
    with pytest.raises(ConfigError, match=said) as raised:
        read_options(given | options)
    assert "\n" not in str(raised.value)


def test_an_empty_batch_handler_is_none() -> None:
    """As one that was not named: the handler is called for each message."""
    given = {"consumer": "tests", "ledger": "sqlite:///unused.db", "handler": "handlers:work"}
    assert read_options(given | {"handler_batch": ""}).handler == "handlers:work"
    with pytest.raises(ConfigError, match="option handler: missing"):
        read_options(given | {"handler_batch": "", "handler": ""})


def test_wrong_columns_say_so(frame: Frame, write: "Write") -> None:
    """A DataFrame that is none of messages is refused before anything runs."""
    with pytest.raises(PySparkException, match="column 'extra' is not part of a message"):
        write(frame("a").selectExpr("id", "1 as extra"))
    with pytest.raises(PySparkException, match="column 'id' is int; it must be string"):
        write(frame("a").selectExpr("1 as id"))
    with pytest.raises(PySparkException, match="has no column 'id'"):
        write(frame("a").select("body"))


def test_overwrite_is_refused(frame: Frame, ledger_url: str) -> None:
    """Effects cannot be undone, so there is nothing that overwrite could mean."""
    writer = frame("a").write.format("oncely").options(consumer="c", ledger=ledger_url)
    with pytest.raises(PySparkException, match="effects cannot be undone"):
        writer.option("handler", "handlers:work").mode("overwrite").save()
