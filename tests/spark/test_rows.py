"""Mode `rows`: a DataFrame's rows and their ledger records, in one commit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conformance.conftest import url_of
from tests.spark.payments import NUMBERED, Place, batches_of, payment

from oncely import ConfigError, State
from oncely._util.crash_points import arm, disarm
from oncely.core.control import Reject
from oncely.spark import process
from oncely.spark.sink.channel import DriverChannel, Stopped, TaskChannel

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STORES = ["sqlite", "postgresql", "mysql"]


def _place(url: str, folder: Path) -> Iterator[Place]:
    place = Place(url, folder)
    with closing(place.ledger):
        yield place
    place.engine.dispose()


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place in each kind of database."""
    yield from _place(url_of(request.param, request, tmp_path), tmp_path)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    """A place in a file."""
    yield from _place(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path)


# ---- Rows --------------------------------------------------------------------------------------


def test_each_row_is_there_once(place: Place) -> None:
    """Copies in a chunk, across chunks and of an earlier run are duplicates; the first is kept."""
    rows = [payment(f"m{n}", n + 1) for n in range(250)]
    copies = [payment("m7", 9_999), payment("m7", 9_998), payment("m200", 9_999)]
    counts = place.run([*rows[:100], *copies, *rows[100:]], chunk="120")
    assert (counts.handled, counts.duplicates_input) == (250, 3)
    assert place.rows() == sorted(
        (row["id"], "a", 9_999 if row["id"] == "m200" else row["amount"], None) for row in rows
    )
    assert place.ledger.counts() == {("tests", State.COMPLETED): 250}
    assert place.record("m200").duplicates == 1
    again = place.run([*rows, payment("new")])
    assert (again.handled, again.duplicates_ledger) == (1, 250)
    assert len(place.rows()) == 251


def test_values_arrive_as_they_are(place: Place) -> None:
    """Text of any kind, nulls, and every type that a column can have."""
    bytes_ = "BYTEA" if place.engine.dialect.name == "postgresql" else "BLOB"
    moment = {"postgresql": "TIMESTAMPTZ", "mysql": "DATETIME(6)"}
    place.execute(
        "CREATE TABLE kinds (id VARCHAR(64), note TEXT, amount NUMERIC(10, 2), truth BOOLEAN,"
        f" day DATE, at {moment.get(place.engine.dialect.name, 'TIMESTAMP')}, raw {bytes_},"
        " number DOUBLE PRECISION)"
    )
    notes = ["", "a,b", 'say "no"', "line\n\\.\n", "\\N", "ünï ☃", " ", None, "'; --", "\t\\t\r\n"]
    at = datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC)
    given = [
        {
            "id": f"m{n}",
            "note": note,
            "amount": None if note is None else Decimal("12.30"),
            "truth": None if note is None else n % 2 == 0,
            "day": None if note is None else date(2024, 2, 29),
            "at": None if note is None else at,
            "raw": None if note is None else b"\x00\xff\\x",
            "number": None if note is None else 1.5,
        }
        for n, note in enumerate(notes)
    ]
    assert place.run(given, table="kinds").handled == len(notes)
    query = "SELECT id, note, amount, truth, day, at, raw, number FROM kinds"
    found = {row[0]: row[1:] for row in place.rows(query)}
    assert [found[f"m{n}"][0] for n in range(len(notes))] == notes
    assert found["m7"] == (None,) * 7
    amount, truth, day, moment_, raw, number = found["m0"][1:]
    assert (Decimal(str(amount)), bool(truth), number) == (Decimal("12.3"), True, 1.5)
    assert (str(day), raw) == ("2024-02-29", b"\x00\xff\\x")
    if isinstance(moment_, datetime) and moment_.tzinfo is not None:
        assert moment_ == at
    else:
        assert str(moment_) == "2024-02-29 23:59:59.123456"


def test_what_is_given_as_text_arrives_as_it_is(place: Place) -> None:
    """JSON is no text that stands in JSON, null is none, and a time of day is one."""
    place.execute("CREATE TABLE texts (id VARCHAR(64), data JSON, at TIME)")
    given: list[dict[str, Any]] = [
        {"id": "a", "data": '{"a": [1, "é"]}', "at": "12:34:56"},
        {"id": "b", "data": None, "at": None},
    ]
    assert place.run(given, table="texts").handled == 2
    is_postgresql = place.engine.dialect.name == "postgresql"
    inside = "data #>> '{a,0}'" if is_postgresql else "json_extract(data, '$.a[0]')"
    found = place.rows(f"SELECT id, {inside}, at, data IS NULL FROM texts")
    assert [(id_, value and int(value)) for id_, value, *_ in found] == [("a", 1), ("b", None)]
    assert str(found[0][2]) in ("12:34:56", str(timedelta(hours=12, minutes=34, seconds=56)))
    assert [row[2:] for row in found[1:]] == [(None, True)]


def test_a_time_without_a_zone_is_in_utc(place: Place) -> None:
    """Wherever the server says that it stands; also once a transaction was undone."""
    is_postgresql = place.engine.dialect.name == "postgresql"
    if is_postgresql:
        name = place.engine.url.database
        place.execute(f"ALTER DATABASE {name} SET timezone TO 'America/New_York'")
    moment = "TIMESTAMPTZ" if is_postgresql else "TIMESTAMP NULL"
    place.execute(
        f"CREATE TABLE moments (id VARCHAR(64), at {moment}, day {moment} CHECK (id <> 'c'))"
    )
    # The first transaction of a new connection is one that is undone.
    place.engine.dispose()
    at, day = datetime(2024, 2, 29, 1, 2, 3), date(2024, 2, 29)  # noqa: DTZ001 - it has no zone.
    counts = place.run([{"id": id_, "at": at, "day": day} for id_ in "abc"], table="moments")
    assert (counts.handled, counts.quarantined.total()) == (2, 1)
    found = place.rows("SELECT at, day FROM moments")
    assert len(found) == 2
    for row in found:
        whole = [datetime.fromisoformat(str(value)) for value in row]
        utc = [
            value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value for value in whole
        ]
        assert utc == [at, datetime(2024, 2, 29)]  # noqa: DTZ001


def test_a_column_with_a_percent_sign(place: Place) -> None:
    """Statements with and without values each write its name as they must."""
    quote = "`" if place.engine.dialect.name == "mysql" else '"'
    column = f"{quote}vat%{quote}"
    place.execute(f"CREATE TABLE rates (area VARCHAR(20) PRIMARY KEY, {column} INTEGER)")
    assert place.run([{"id": "m1", "area": "a", "vat%": 19}], table="rates").handled == 1
    assert place.rows("SELECT * FROM rates") == [("a", 19)]
    if place.engine.dialect.name == "mysql":
        return  # There SQLAlchemy's own upsert names another column.
    later = [{"id": "m2", "area": "a", "vat%": 7}]
    assert place.run(later, table="rates", upsert="area").handled == 1
    assert place.rows("SELECT * FROM rates") == [("a", 7)]


def test_the_id_is_stored_where_there_is_a_place_for_it(place: Place) -> None:
    """Not in a table without such a column, nor in one that the database numbers itself."""
    place.execute("CREATE TABLE plain (amount INTEGER)")
    place.execute(f"CREATE TABLE numbered (id {NUMBERED[place.engine.dialect.name]}, amount INT)")
    rows = [{"id": "a", "amount": 1}, {"id": "b", "amount": 2}, {"id": "a", "amount": 1}]
    for table in ("plain", "numbered"):
        assert place.run(rows, table=table, consumer=table).handled == 2
        assert place.rows(f"SELECT amount FROM {table}") == [(1,), (2,)]


# ---- Rows that are refused ---------------------------------------------------------------------


def test_what_the_database_refuses_is_set_aside(place: Place) -> None:
    """The rest of its chunk is stored; the record tells why, and a redelivery is set aside too."""
    rows = [payment(f"m{n:03}") for n in range(100)]
    rows[13]["amount"] = -5
    rows[14] = payment("m014", 1, "x" * 300)
    rows[70]["account"] = None
    # SQLite takes a text of any length.
    bad = {"m013", "m070"} | ({"m014"} if place.engine.dialect.name != "sqlite" else set())
    for handled in (100 - len(bad), 0):
        counts = place.run(rows)
        assert (counts.handled, counts.quarantined.total()) == (handled, len(bad))
        assert set(place.set_aside()) == bad
    assert place.ids() == sorted({row["id"] for row in rows} - bad)
    reason, row = place.set_aside()["m013"]
    assert reason.startswith("refused by the database: ")
    assert '"amount": -5' in row
    record = place.record("m013")
    assert (record.state, record.exhausted) == (State.FAILED, True)
    assert record.error == f"Reject: {reason}"


def test_a_number_that_is_too_large(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """A value that Spark's type holds, and the column's does not."""
    for kind in ("postgresql", "mysql"):
        for place in _place(url_of(kind, request, tmp_path), tmp_path / kind):
            counts = place.run([payment("a"), payment("b", 2**40), payment("c")])
            assert (counts.handled, counts.quarantined.total()) == (2, 1)
            assert place.ids() == ["a", "c"]


def test_a_moment_that_is_too_late(mysql_url: str, tmp_path: Path) -> None:
    """The driver calls that an error of the server's; its state says that it is the row's."""
    for place in _place(mysql_url, tmp_path):
        place.execute("CREATE TABLE moments (id VARCHAR(64), at TIMESTAMP NULL)")
        late, early = datetime(2200, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)
        rows = [{"id": "a", "at": early}, {"id": "b", "at": late}]
        counts = place.run(rows, table="moments")
        assert (counts.handled, counts.quarantined.total()) == (1, 1)
        assert place.rows("SELECT id FROM moments") == [("a",)]


def test_rows_that_are_no_messages(here: Place) -> None:
    """Without an id, or with one that no database stores; all else is stored."""
    rows = [payment(None), payment(" "), payment("x" * 300), payment("ok"), payment("é b")]
    counts = here.run(rows)
    assert counts.handled == 2
    assert counts.quarantined == {"missing id": 1, "empty id": 1, "too long id": 1}
    assert here.ids() == ["ok", "é b"]


def test_what_the_source_could_not_read(here: Place) -> None:
    """The pipeline's own columns say why, and give the row as it was; they are no columns here."""
    rows = [
        {**payment("a"), "oncely_row": '{"a": 1}', "oncely_broken": None},
        {**payment("b"), "oncely_row": '{"b": ', "oncely_broken": "not json"},
    ]
    counts = here.run(rows)
    assert (counts.handled, counts.quarantined) == (1, {"not json": 1})
    assert here.set_aside() == {"b": ("not json", '{"b": ')}
    assert here.ids() == ["a"]


# ---- Upsert ------------------------------------------------------------------------------------


def test_rows_are_renewed_by_key(place: Place) -> None:
    """Of messages with one key the last counts; a redelivery changes nothing."""
    options = {"table": "balances", "upsert": "account"}
    rows: list[dict[str, Any]] = [
        {"id": f"m{n}", "account": account, "amount": n}
        for n, account in enumerate(["b", "a", "b", None, "a", "c"])
    ]
    counts = place.run(rows, **options)
    assert (counts.handled, counts.quarantined) == (5, {"missing account": 1})
    balances = "SELECT account, amount FROM balances"
    assert place.rows(balances) == [("a", 4), ("b", 2), ("c", 5)]
    later = [{"id": "n0", "account": "a", "amount": 40}, {**rows[2], "amount": 99}]
    assert place.run(later, **options).handled == 1
    assert place.rows(balances) == [("a", 40), ("b", 2), ("c", 5)]


# ---- What others hold --------------------------------------------------------------------------


def test_a_live_claim_is_waited_for(place: Place) -> None:
    """Rows of others are written meanwhile; the outcome of the other worker decides."""
    done, failed = place.hold("done", "1m"), place.hold("failed", "1m")
    task = place.task()
    thread = threading.Thread(
        target=task.run, args=[batches_of([payment("done"), payment("x"), payment("failed")])]
    )
    thread.start()
    _until(lambda: place.ids() == ["x"])
    place.ledger.complete(done)
    place.ledger.fail(failed, "no")
    thread.join(30)
    assert place.ids() == ["failed", "x"]
    assert (task.counts.handled, task.counts.duplicates_ledger) == (2, 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("retry", (2, 0, 0)), ("hold", (1, 1, 0)), ("dead_letter", (1, 0, 1))],
)
def test_a_claim_that_has_run_out(here: Place, policy: str, expected: tuple[int, int, int]) -> None:
    """What a leased worker left in doubt: taken over, or counted as the policy says."""
    here.hold("a", "1ms")
    _until(lambda: here.ledger.now() > (here.record("a").lease_until or 0.0))
    counts = here.run([payment("a"), payment("b")], on_in_doubt=policy)
    assert (counts.handled, counts.in_doubt, counts.failed) == expected


def test_other_outcomes(here: Place) -> None:
    """Busy and let go, failed for good, rejected before, and handled with nothing left to send."""
    here.hold("busy", "1m")
    here.ledger.fail(here.hold("failed", "1m"), "broken", final=True)
    here.ledger.fail(here.hold("rejected", "1m"), Reject("no such account"), final=True)
    here.ledger.handled(here.hold("handled", "1m"))
    ids = ["busy", "failed", "rejected", "handled", "new"]
    counts = here.run([payment(id_) for id_ in ids], on_busy="discard")
    assert here.ids() == ["new"]
    assert (counts.handled, counts.failed) == (1, 1)
    assert counts.quarantined == {"no such account": 1}
    assert (counts.duplicates_input, counts.duplicates_ledger) == (0, 2)
    assert here.record("handled").state is State.COMPLETED


def test_two_drivers_at_once(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The same rows in opposite orders and chunks: each is there once, and nobody deadlocks."""
    for kind in STORES:
        for place in _place(url_of(kind, request, tmp_path), tmp_path / kind):
            rows = [payment(f"m{n:04}") for n in range(1_500)]
            tasks = [place.task(chunk="100"), place.task(chunk="130")]
            orders = [rows, rows[::-1]]
            threads = [
                threading.Thread(target=task.run, args=[batches_of(order)])
                for task, order in zip(tasks, orders, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert sum(task.counts.handled for task in tasks) == len(rows)
            assert sum(task.counts.settled for task in tasks) == 2 * len(rows)
            assert place.ids() == [row["id"] for row in rows]


# ---- Ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before_completed", "before_commit", "after_commit"])
def test_a_task_that_is_run_again(place: Place, point: str) -> None:
    """Wherever a task breaks off, rows and records agree, and the next run brings the rest."""

    def break_off() -> None:
        disarm()
        raise RuntimeError(point)

    rows = [payment(f"m{n}") for n in range(30)]
    arm(point, break_off)
    with pytest.raises(RuntimeError, match=point):
        place.run(rows, chunk="10")
    stored = 10 if point == "after_commit" else 0
    assert len(place.rows()) == place.ledger.counts().get(("tests", State.COMPLETED), 0) == stored
    counts = place.run(rows, chunk="10")
    assert (counts.handled, counts.duplicates_ledger) == (30 - stored, stored)
    assert place.ids() == sorted(row["id"] for row in rows)


def test_told_to_stop(here: Place) -> None:
    """Between chunks, and while it waits for another worker."""
    here.hold("busy", "1m")
    channel = DriverChannel("127.0.0.1")
    task = here.task(TaskChannel(channel.address, channel.token))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            task.run(batches_of([payment("busy"), payment("x")]))
        except Stopped as stopped:
            failed.append(stopped)

    thread = threading.Thread(target=run)
    thread.start()
    _until(lambda: here.ids() == ["x"])
    channel.stop(0.0)
    thread.join(30)
    late = here.task(TaskChannel(channel.address, channel.token))
    with pytest.raises(Stopped):
        late.run(batches_of([payment("y")]))
    channel.close()
    assert failed
    assert here.ids() == ["x"]


def test_a_table_that_is_gone_ends_the_task(place: Place) -> None:
    """It is no fault of the rows: none is set aside, and no record says that it is stored."""
    task = place.task()
    place.execute("DROP TABLE payments")
    with pytest.raises(Exception, match="payments"):
        task.run(batches_of([payment("a"), payment("b")]))
    assert place.ledger.counts() == {}
    assert task.counts.settled == 0


# ---- Through Spark -----------------------------------------------------------------------------


def test_through_the_sink(spark: "SparkSession", here: Place) -> None:
    """From a DataFrame, by format("oncely"), in several tasks."""
    payments = spark.range(2_000).selectExpr(
        "concat('m', id % 1500) AS id", "'a' AS account", "cast(id % 1500 + 1 AS INT) AS amount"
    )
    channel = DriverChannel("127.0.0.1")
    options = here.options(channel=channel.address, channel_token=channel.token)
    with closing(channel):
        writer = payments.repartition(3, "id").write.format("oncely").options(**options)
        writer.mode("append").save()
        counts = channel.committed()
    assert (counts.received, counts.handled, counts.duplicates_input) == (2_000, 1_500, 500)
    assert here.rows("SELECT count(*), sum(amount) FROM payments") == [(1_500, 1_125_750)]


def test_several_tasks_renew_in_order(spark: "SparkSession", place: Place) -> None:
    """However many tasks there are: the messages of one key meet in one, and the last by id wins;
    copies of an id whose keys differ meet in the ledger.
    """
    balances = spark.range(3_000).selectExpr(
        "concat('m', lpad(cast(id % 2900 AS STRING), 4, '0')) AS id",
        "if(id >= 2900, 'copy', concat('a', id % 50)) AS account",
        "cast(id % 2900 AS INT) AS amount",
    )
    options: dict[str, Any] = place.options(table="balances", upsert="account", chunk="100")
    report = process(balances, partitions=4, **options)
    assert (report.received, report.handled, report.duplicates) == (3_000, 2_900, 100)
    found = dict(place.rows("SELECT account, amount FROM balances"))
    found.pop("copy", None)
    # The first hundred ids each came twice, under two accounts; the others tell.
    assert found == {f"a{n}": 2_850 + n for n in range(50)}


def test_a_key_that_the_rows_lack(spark: "SparkSession", here: Place) -> None:
    """It is the sink that says so, in a line."""
    amounts = spark.range(1).selectExpr("'a' AS id", "1 AS amount")
    options: dict[str, Any] = here.options(table="balances", upsert="account")
    with pytest.raises(ConfigError, match="account"):
        process(amounts, **options)


def _until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    waiting = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if holds():
            return
        waiting.wait(0.02)
    raise AssertionError("it does not come to hold")
