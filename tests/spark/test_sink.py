"""The sink, written to as users write to it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from tests.conditions import wait_until

from oncely import Claim, Granted, Key, Ledger, Policy, State
from oncely.core.commands import Outcome
from oncely.core.waiting import retries_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Effects, Write

Frame = Callable[..., "DataFrame"]


def claimed(ledger: Ledger, id_: str, lease: str) -> Claim:
    """A claim that somebody else holds."""
    outcome = ledger.claim(Key("tests", id_), lease)
    assert isinstance(outcome, Granted)
    return outcome.claim


def set_aside(folder: Path) -> list[dict[str, Any]]:
    """What is in the quarantine."""
    return [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()
    ]


def test_each_message_is_handled_once(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """Unique messages have one effect each, and their records are completed."""
    counts = write(frame(*(f"m{n}" for n in range(2_500)), partitions=3))
    assert (counts.received, counts.handled, counts.settled) == (2_500, 2_500, 2_500)
    assert set(effects.per_message().values()) == {1}
    assert ledger.counts() == {("tests", State.COMPLETED): 2_500}


def test_duplicates_are_told_apart(frame: Frame, write: "Write", effects: "Effects") -> None:
    """A copy in the same input and one that the ledger knew before count apart."""
    first = write(frame("a", "b", "a", "a"))
    again = write(frame("a", "b", "c"))
    assert (first.handled, first.duplicates_input, first.duplicates_ledger) == (2, 2, 0)
    assert (again.handled, again.duplicates_input, again.duplicates_ledger) == (1, 0, 2)
    assert effects.per_message() == {"a": 1, "b": 1, "c": 1}


def test_copies_in_two_tasks_have_one_effect(
    frame: Frame, write: "Write", effects: "Effects"
) -> None:
    """Where copies meet in different tasks, one waits for the other and finds a duplicate."""
    ids = [f"m{n}" for n in range(500)]
    # Dealt out in turn to three tasks: 500 apart is never the same one.
    counts = write(frame(*ids, *ids, partitions=3), since="0")
    assert (counts.handled, counts.duplicates_input) == (500, 500)
    assert set(effects.per_message().values()) == {1}


def test_a_storm_of_copies_has_one_effect(frame: Frame, write: "Write", effects: "Effects") -> None:
    """One id a thousand times is one effect, in bounded work."""
    counts = write(frame(*["same"] * 1_000))
    assert (counts.handled, counts.duplicates_input) == (1, 999)
    assert effects.per_message() == {"same": 1}


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


def test_bytes_that_are_no_text(
    frame: Frame, write: "Write", spark: "SparkSession", effects: "Effects"
) -> None:
    """An id that is no UTF-8 is set aside, a body that is none stays the bytes that it is."""
    bad = "cast(X'FF41' as string)"
    source = f"'{effects.path}' as source"
    messages = spark.sql(
        f"select {bad} as id, '{{}}' as body, {source} union all select 'good', {bad}, {source}"
    )
    counts = write(messages)
    assert counts.quarantined == {"id with a lone surrogate": 1}
    assert counts.handled == 1


def test_rejected_messages_are_set_aside_every_time(
    frame: Frame, write: "Write", ledger: Ledger, tmp_path: Path
) -> None:
    """What a handler rejects is quarantined with its reason, and again when it comes again."""
    messages = frame(("a", '{"bad": true}'), ("b", "{}"), ("c", "no json"))
    first, again = write(messages, "reject_bad"), write(messages, "reject_bad")
    reasons = {"nobody to send to": 1, "body is not JSON": 1}
    assert (first.handled, first.quarantined) == (1, reasons)
    assert (again.handled, again.duplicates_ledger, again.quarantined) == (0, 1, reasons)
    record = ledger.find(Key("tests", "a"))
    assert record is not None
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


def test_failures_are_tried_again(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """A failed message waits, and runs again in a write after its delay."""
    options = {"tries": "3", "backoff": "400ms, 1s"}
    counts = write(frame("a", "b", "a"), "fail_first", **options)
    assert (counts.duplicates_input, counts.waiting, counts.failed) == (1, 2, 0)
    wait_until(lambda: ledger.mailbox.free_in_s(retries_of("tests")) == 0)
    counts = write(frame("c"), "work", **options)
    assert (counts.received, counts.handled) == (3, 3)
    assert {line["id"]: line["attempt"] for line in effects.lines()} == {"a": 2, "b": 2, "c": 1}
    assert {line["fence"] for line in effects.lines()} == {1, 2}


def test_tries_end(frame: Frame, write: "Write", ledger: Ledger) -> None:
    """A message that fails every time is reported failed, its error kept without the password."""
    messages = frame(("a", '{"bad": true}'), "b")
    counts = write(messages, "fail_bad", tries="2", backoff="0s")
    again = write(messages, "fail_bad", tries="2", backoff="0s")
    assert (counts.handled, counts.failed) == (1, 1)
    assert (again.duplicates_ledger, again.failed) == (1, 1)
    record = ledger.find(Key("tests", "a"))
    assert record is not None
    assert (record.attempts, record.exhausted) == (2, True)
    assert record.error == "ValueError: password=*** is bad"


def test_unrecoverable_is_not_tried_again(frame: Frame, write: "Write", ledger: Ledger) -> None:
    """A failure that is declared final takes one try."""
    assert write(frame("a"), "give_up").failed == 1
    record = ledger.find(Key("tests", "a"))
    assert record is not None
    assert record.attempts == 1


def test_a_live_claim_is_waited_for(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """What another worker holds is a duplicate once that worker completes it."""
    claim = claimed(ledger, "a", "1h")

    def complete_once_it_is_waited_for() -> None:
        wait_until(effects.lines)
        ledger.complete(claim)

    with ThreadPoolExecutor(1) as pool:
        completed = pool.submit(complete_once_it_is_waited_for)
        counts = write(frame("a", "b"))
        completed.result()
    assert (counts.handled, counts.duplicates_ledger) == (1, 1)
    assert effects.per_message() == {"b": 1}


def test_a_claim_that_ran_out_is_taken_over(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """With the default policy a claim whose holder is gone runs again, under the next fence."""
    claimed(ledger, "a", "1s")
    assert write(frame("a")).handled == 1
    assert [line["fence"] for line in effects.lines()] == [2]


def test_hold_reports_what_is_in_doubt(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """Under `hold` a claim that ran out is reported, and does not run."""
    claimed(ledger, "a", "500ms")
    counts = write(frame("a", "b"), on_in_doubt="hold")
    assert (counts.handled, counts.in_doubt) == (1, 1)
    assert effects.per_message() == {"b": 1}


def test_a_probe_decides_what_is_in_doubt(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """What a probe finds out completes the message, runs it, or leaves it in doubt."""
    findings = ("happened", "not_happened", "unknown")
    for id_ in findings:
        claimed(ledger, id_, "500ms")
    messages = frame(*((id_, f'{{"finding": "{id_}"}}') for id_ in findings))
    counts = write(messages, on_in_doubt="handlers:happened")
    assert (counts.handled, counts.duplicates_ledger, counts.in_doubt) == (1, 1, 1)
    assert effects.per_message() == {"not_happened": 1}


def test_a_probe_that_fails_leaves_the_doubt(
    frame: Frame, write: "Write", effects: "Effects", ledger: Ledger
) -> None:
    """A probe that raises ends nothing: its message stays in doubt, the others are handled."""
    claimed(ledger, "b", "500ms")
    counts = write(frame("a", "b", "c"), on_in_doubt="handlers:probe_down")
    assert (counts.handled, counts.in_doubt) == (2, 1)
    assert effects.per_message() == {"a": 1, "c": 1}


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
    cannot be kept is set aside with its reason.
    """
    messages = frame(("a", '{"bad": true}'), "b", "c")
    counts = write(messages, function, tries="1", **options)
    set_aside = sum(counts.quarantined.values())
    assert (counts.handled, counts.failed, set_aside) == (2, failed, 1 - failed)
    assert (effects.per_message()["b"], effects.per_message()["c"]) == (1, 1)


def test_a_full_quarantine_keeps_no_other_from_being_stored(
    frame: Frame, write: "Write", ledger: Ledger, tmp_path: Path
) -> None:
    """Where the quarantine cannot be written any more the task fails, but what was done is
    completed.
    """
    with pytest.raises(PySparkException, match="quarantine"):
        write(frame(("a", '{"bad": true}'), "b", "c"), "spoil_and_reject_bad")
    assert (tmp_path / "quarantine").is_file()
    assert ledger.counts() == {("tests", State.COMPLETED): 2, ("tests", State.FAILED): 1}


def test_rejections_keep_their_reason(frame: Frame, write: "Write") -> None:
    """A rejection of a type of its own, or without a text, is the same when it comes again."""
    first, again = (write(frame("a", "b"), "reject_by_type") for _ in range(2))
    assert first.quarantined == again.quarantined == {"nobody": 1, "no reason given": 1}


def test_a_handlers_own_fence_is_a_failure_like_others(
    frame: Frame, write: "Write", effects: "Effects"
) -> None:
    """An error about another claim, raised by the handler, says nothing about this one."""
    assert write(frame("a"), "nest", backoff="0s").handled == 1
    assert [line["attempt"] for line in effects.lines()] == [2]


def test_a_handler_that_exits_has_failed(frame: Frame, write: "Write", effects: "Effects") -> None:
    """SystemExit is a failed attempt, as an exception is: its tries are counted."""
    messages = frame("a", ("b", '{"breaks": true}'), "c")
    counts = write(messages, "act_and_exit", tries="2", backoff="0s")
    assert (counts.handled, counts.failed) == (2, 1)
    assert effects.per_message() == {"a": 1, "b": 2, "c": 1}


def test_skip_leaves_the_record_failed(frame: Frame, write: "Write", ledger: Ledger) -> None:
    """Under `skip` a failure is not tried again, and a redelivery passes as a duplicate."""
    messages = frame(("a", '{"bad": true}'))
    assert write(messages, "fail_bad", on_failed="skip").failed == 1
    assert write(messages, "fail_bad", on_failed="skip").duplicates_ledger == 1
    record = ledger.find(Key("tests", "a"))
    assert record is not None
    assert (record.state, record.exhausted, record.attempts) == (State.FAILED, False, 1)


def test_values_that_python_cannot_hold(
    write: "Write", spark: "SparkSession", effects: "Effects"
) -> None:
    """A time beyond year 9999 and headers that are not text are set aside; the others go on."""
    source = f"'{effects.path}' as source, '{{}}' as body"
    late, text = "timestamp_seconds(1e12)", "cast(X'FF41' as string)"
    messages = spark.sql(
        f"select 'a' as id, {late} as time, map('h', 'x') as headers, {source} union all "
        f"select 'b', null, map('h', {text}), {source} union all "
        f"select 'c', null, null, {source}"
    )
    counts = write(messages)
    assert counts.quarantined == {"unreadable time": 1, "unreadable headers": 1}
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
    claimed(ledger, "a", "none")
    assert write(frame("a"), lease="1s").in_doubt == 1


def test_an_error_of_the_input_doubles_nothing(
    frame: Frame, write: "Write", effects: "Effects"
) -> None:
    """A task whose rows stop coming in its first attempt runs again; no effect happens twice."""
    from pyspark.sql import functions as f

    @f.udf("string", useArrow=False)
    def body(id_: str) -> str:
        from pyspark import TaskContext

        context = TaskContext.get()
        if id_ == "m700" and context is not None and context.attemptNumber() == 0:
            raise OSError("the input is gone")
        return "{}"

    rows = frame(*(f"m{n}" for n in range(1_000)))
    write(rows.withColumn("body", body("id")), chunk="100")
    assert effects.per_message() == {f"m{n}": 1 for n in range(1_000)}


def test_a_killed_worker_leaves_what_is_in_doubt(
    frame: Frame, write: "Write", effects: "Effects"
) -> None:
    """Under `hold`, after a worker was killed: no effect twice, and what has none is in doubt."""
    rows = [(f"m{n:03}", "{}") for n in range(400)]
    rows[250] = ("m250", '{"breaks": true}')
    counts = write(frame(*rows), "be_killed", on_in_doubt="hold", lease="2s")
    done = effects.per_message()
    assert set(done.values()) == {1}
    assert counts.in_doubt >= 400 - len(done) > 0
    assert counts.settled == 400


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"consumer": ""}, "option consumer: missing"),
        ({"handler": "nowhere:to_be_found"}, "handler: 'nowhere:to_be_found' cannot be imported"),
        ({"handler": "handlers"}, 'names no function; write "module:function"'),
        ({"ledger": "oracle://x"}, "is not of a known kind"),
        ({"ledger": "memory://"}, "is seen by one process only"),
        ({"tries": "many"}, "tries: 'many' is not a whole number"),
        ({"tires": "3"}, "tires: there is no such key; did you mean 'tries'?"),
        ({"mode": "leashed"}, "option mode: 'leashed' is not offered"),
        ({"mode": "rows"}, 'option handler: mode "rows" calls none; drop it, or write another'),
        ({"lease": "0s"}, "a lease of zero"),
        ({"on_outage": "run"}, "on_outage: on Spark it is always 'pause'"),
    ],
)
def test_wrong_options_say_so(
    frame: Frame, write: "Write", options: dict[str, str], said: str
) -> None:
    """A wrong option ends the write with words that name it."""
    with pytest.raises(PySparkException, match=said.replace("(", r"\(")):
        write(frame("a"), **options)


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


def test_a_stream_writes_each_batch(
    spark: "SparkSession", effects: "Effects", tmp_path: Path, ledger_url: str, ledger: Ledger
) -> None:
    """The sink of a streaming query: copies in other batches are duplicates, bad rows are kept."""
    folder = tmp_path / "in"
    folder.mkdir()
    for n in range(3):
        rows = [f'{{"id": "m{i}"}}' for i in range(n * 10, n * 10 + 20)] + ["{}"]
        (folder / f"{n}.json").write_text("\n".join(rows))
    messages = (
        spark.readStream.schema("id string")
        .option("maxFilesPerTrigger", 1)
        .json(str(folder))
        .selectExpr("id", f"'{effects.path}' as source")
    )
    query = (
        messages.writeStream.format("oncely")
        .options(consumer="tests", ledger=ledger_url, handler="handlers:work")
        .options(handler_path=str(Path(__file__).parent), quarantine=str(tmp_path / "quarantine"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert effects.per_message() == {f"m{i}": 1 for i in range(40)}
    assert ledger.counts() == {("tests", State.COMPLETED): 40}
    assert [row["reason"] for row in set_aside(tmp_path / "quarantine")] == ["missing id"] * 3
