"""Mode `rows`: a DataFrame's rows and their ledger records, in one commit."""

import json
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.conformance.conftest import url_of
from tests.spark.payments import NUMBERED, Place, batches_of, payment
from tests.spark.tasks import at_once
from tests.turns import in_turn

from oncely import ConfigError, State
from oncely._util.crash_points import arm, disarm
from oncely.core.control import Reject
from oncely.core.ids import ID_IS_NO_STRING
from oncely.spark import process
from oncely.spark.pipeline.config import read_config
from oncely.spark.pipeline.pipeline_source import read_messages
from oncely.spark.sink.channel import DriverChannel, Stopped, TaskChannel
from oncely.spark.sink.message_rows import numbered
from oncely.spark.sink.spreading import spread

if TYPE_CHECKING:
    from pyspark.sql import Row as SparkRow
    from pyspark.sql import SparkSession

STORES = ["postgresql", *in_turn("other database of rows", ["sqlite", "mysql"])]


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(url_of(request.param, request, tmp_path), tmp_path)) as place:
        yield place


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with closing(Place(f"sqlite:///{tmp_path / 'ledger.db'}", tmp_path)) as place:
        yield place


@pytest.fixture
def on_postgresql(postgresql_url: str, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(postgresql_url, tmp_path)) as place:
        yield place


@pytest.fixture
def on_mariadb(mysql_url: str, tmp_path: Path) -> Iterator[Place]:
    with closing(Place(mysql_url, tmp_path)) as place:
        yield place


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
    before = place.record("m200")
    again = place.run([*rows, payment("new")])
    assert (again.handled, again.duplicates_ledger) == (1, 250)
    assert len(place.rows()) == 251
    assert place.record("m200") == before


def age(place: Place) -> None:
    days = {
        "sqlite": "last_processed_at - 172800",
        "postgresql": "last_processed_at - interval '2 days'",
        "mysql": "last_processed_at - INTERVAL 2 DAY",
    }
    set_back = days[place.engine.dialect.name]
    place.execute(f"UPDATE processed_messages SET last_processed_at = {set_back}")


def test_duplicates_are_taken_down_once_a_day(place: Place) -> None:
    """A replay writes nothing, chunk by chunk, but what keeps records from being purged."""
    rows = [payment(f"m{n}") for n in range(60)]
    assert place.run(rows, chunk="10").handled == 60
    before = [place.record(row["id"]) for row in rows]
    for _ in range(2):
        counts = place.run([*rows, rows[0]], chunk="10")
        assert (counts.handled, counts.duplicates_ledger) == (0, 61)
    assert [place.record(row["id"]) for row in rows] == before
    age(place)
    aged = place.record("m1").last_seen
    assert aged < before[1].last_seen - 86_400
    assert place.run(rows, chunk="10").duplicates_ledger == 60
    renewed = place.record("m1")
    assert (renewed.duplicates, renewed.last_seen > before[1].last_seen) == (1, True)
    assert place.run(rows, count_duplicates="each").duplicates_ledger == 60
    assert place.record("m1").duplicates == 2


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


_ODD_NAMES = ["a`b", "a.b", "a b", 'a"b', "größe", "a:b", "a(b)", "a[b]", "select", "a\\b", "A"]


def test_columns_of_any_name(place: Place) -> None:
    """Backticks, dots, quotes and spaces in names are part of them; also in a key."""
    quoted = place.engine.dialect.identifier_preparer.quote
    # In MariaDB SQLAlchemy finds a backtick in a name twice, and "A" is another "a".
    names = _ODD_NAMES[place.engine.dialect.name == "mysql" :]
    columns = "".join(f", {quoted(name)} VARCHAR(20)" for name in names)
    key = f"PRIMARY KEY ({quoted(names[0])}, {quoted('a b')})"
    place.execute(f"CREATE TABLE odd (id VARCHAR(64){columns}, {key})".replace(":b", "\\:b"))
    first = {"id": "m1", **{name: name for name in names}}
    second = {**first, "id": "m2", "größe": "new"}
    for row, upsert in ((first, ""), (second, f"{names[0]},a b")):
        counts = place.run([row], table="odd", upsert=upsert)
        assert (counts.handled, counts.quarantined) == (1, {})
        [found] = place.rows("SELECT * FROM odd")
        assert found == tuple(row.values())


def test_times_of_a_session_in_any_zone(place: Place) -> None:
    """They are stored in UTC, and shown so where their row is set aside."""
    moment = {"postgresql": "TIMESTAMPTZ", "mysql": "DATETIME(6)"}
    type_ = moment.get(place.engine.dialect.name, "TIMESTAMP")
    place.execute(f"CREATE TABLE moments (id VARCHAR(64), at {type_}, CHECK (id <> 'bad'))")
    at = datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=UTC)
    task = place.task(table="moments")
    for zone in ("UTC+3", "GMT+03:00", "+03:00", "Europe/Berlin"):
        times = pa.array([at, at], pa.timestamp("us", "UTC")).cast(pa.timestamp("us", zone))
        task.run(numbered([pa.RecordBatch.from_pydict({"id": [zone, "bad"], "at": times})]))
    place.quarantine.close()
    assert (task.counts.handled, task.counts.quarantined.total()) == (4, 4)
    for (found,) in place.rows("SELECT at FROM moments"):
        whole = datetime.fromisoformat(str(found))
        assert whole.replace(tzinfo=whole.tzinfo or UTC) == at
    assert '"at": "2024-02-29 23:59:59.123456+00:00"' in place.set_aside()["bad"][1]


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


def test_a_number_that_is_too_large(on_postgresql: Place, on_mariadb: Place) -> None:
    """A value that Spark's type holds, and the column's does not."""
    for place in (on_postgresql, on_mariadb):
        counts = place.run([payment("a"), payment("b", 2**40), payment("c")])
        assert (counts.handled, counts.quarantined.total()) == (2, 1)
        assert place.ids() == ["a", "c"]


def test_a_moment_that_is_too_late(on_mariadb: Place) -> None:
    """The driver calls that an error of the server's; its state says that it is the row's."""
    on_mariadb.execute("CREATE TABLE moments (id VARCHAR(64), at TIMESTAMP NULL)")
    late, early = datetime(2200, 1, 1, tzinfo=UTC), datetime(2024, 1, 1, tzinfo=UTC)
    rows = [{"id": "a", "at": early}, {"id": "b", "at": late}]
    counts = on_mariadb.run(rows, table="moments")
    assert (counts.handled, counts.quarantined.total()) == (1, 1)
    assert on_mariadb.rows("SELECT id FROM moments") == [("a",)]


def test_what_exceeds_a_limit_of_the_server(on_postgresql: Place) -> None:
    """A text that is too long for an index, and one that is nested too deeply: class 54."""
    on_postgresql.execute("CREATE TABLE notes (id VARCHAR(64), note TEXT, data JSON)")
    on_postgresql.execute("CREATE INDEX ON notes (note)")
    long = "".join(f"{random.getrandbits(64):016x}" for _ in range(600))
    rows = [{"id": f"m{n}", "note": "x", "data": "{}"} for n in range(20)]
    rows[3]["note"], rows[17]["data"] = long, "[" * 100_000
    counts = on_postgresql.run(rows, table="notes")
    assert (counts.handled, counts.quarantined.total()) == (18, 2)
    assert "index row" in on_postgresql.set_aside()["m3"][0]
    assert "stack depth" in on_postgresql.set_aside()["m17"][0]


@pytest.mark.in_turn("long on Spark")
def test_what_a_trigger_refuses(on_postgresql: Place) -> None:
    """Whatever state of its own it gives: but one that says that the server is at fault."""
    on_postgresql.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " IF NEW.note <> '' THEN RAISE EXCEPTION 'no: %', NEW.note USING ERRCODE = NEW.note;"
        " END IF; RETURN NEW; END $$"
    )
    on_postgresql.execute(
        "CREATE TRIGGER refusing BEFORE INSERT ON payments FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    refused = ["38000", "45000", "21000", "ZZ123", "09000"]
    rows = [payment(state, note=state) for state in refused]
    counts = on_postgresql.run([payment("fine", note=""), *rows])
    assert (counts.handled, counts.quarantined.total()) == (1, len(refused))
    for state in ("53100", "25006", "42501", "42P01", "57014", "XX000"):
        with pytest.raises(psycopg.Error, match="no: "):
            on_postgresql.run([payment("worse", note=state)])
    assert on_postgresql.ledger.counts()["tests", State.COMPLETED] == 1


@pytest.mark.in_turn("long on Spark")
def test_what_mariadb_refuses(on_mariadb: Place) -> None:
    """Its driver calls most of it operational: rows too large, partitions, and what is not JSON."""
    on_mariadb.execute(
        "CREATE TABLE parts (id VARCHAR(64), amount INTEGER, data LONGTEXT)"
        " PARTITION BY RANGE (amount) (PARTITION small VALUES LESS THAN (10))"
    )
    [[most]] = on_mariadb.rows("SELECT @@max_allowed_packet")
    rows: list[dict[str, Any]] = [
        {"id": "fine", "amount": 1, "data": "x" * 1_000_000},
        {"id": "no partition", "amount": 10, "data": ""},
        {"id": "too large", "amount": 1, "data": "x" * (most + 1)},
        {"id": "fine too", "amount": 2, "data": "x"},
    ]
    counts = on_mariadb.run(rows, table="parts")
    assert (counts.handled, counts.quarantined.total()) == (2, 2)
    assert set(on_mariadb.set_aside()) == {"no partition", "too large"}


def test_what_sqlite_refuses(here: Place) -> None:
    """What a check or an index looks into, and is not JSON; and a value of another type."""
    here.execute("CREATE TABLE docs (id TEXT, data TEXT, amount INTEGER) STRICT")
    here.execute("CREATE INDEX by_a ON docs (json_extract(data, '$.a'))")
    rows = [{"id": "a", "data": "{}"}, {"id": "b", "data": "{"}, {"id": "c", "data": "[]"}]
    counts = here.run(rows, table="docs")
    assert (counts.handled, counts.quarantined.total()) == (2, 1)
    assert "malformed JSON" in here.set_aside()["b"][0]


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


_PRICES = (
    "CREATE TABLE prices (article VARCHAR(20) PRIMARY KEY, version INTEGER, price INTEGER,"
    " note VARCHAR(20))"
)
_NEWEST = {"table": "prices", "upsert": "article", "sequence_by": "version"}


def price(id_: str, version: int | None, article: str = "tea") -> dict[str, Any]:
    """A row whose price tells its version."""
    return {"id": id_, "article": article, "version": version, "price": (version or 0) * 10}


def prices(place: Place) -> list[Any]:
    return place.rows("SELECT article, version, price, note FROM prices")


@pytest.mark.parametrize("chunk", ["1000", "2"])
def test_the_newest_row_stays(place: Place, chunk: str) -> None:
    """In a chunk, between chunks and batches; what comes too late is handled all the same."""
    place.execute(_PRICES)
    rows = [
        *(price(f"m{n}", version) for n, version in enumerate([3, 9, 1, 7, None, 2])),
        *(price(f"n{n}", version, "milk") for n, version in enumerate([1, 2])),
    ]
    counts = place.run(rows, chunk=chunk, **_NEWEST)
    assert (counts.handled, counts.quarantined) == (7, {"missing version": 1})
    assert prices(place) == [("milk", 2, 20, None), ("tea", 9, 90, None)]
    late = {**price("z", 8), "price": 81}
    assert place.run([late], chunk=chunk, **_NEWEST).handled == 1
    assert place.record("z").state is State.COMPLETED
    assert prices(place)[1] == ("tea", 9, 90, None)
    for id_, version, given in (("same", 9, 91), ("next", 10, 100)):
        assert place.run([{**price(id_, version), "price": given}], **_NEWEST).handled == 1
        assert prices(place)[1] == ("tea", version, given, None)


def test_a_row_without_a_sequence_is_renewed(place: Place) -> None:
    """One that was there before; what rows do not have stays as it is."""
    place.execute(_PRICES)
    place.execute("INSERT INTO prices VALUES ('tea', NULL, 5, 'mine')")
    assert place.run([price("a", -1)], **_NEWEST).handled == 1
    assert prices(place) == [("tea", -1, -10, "mine")]


def test_several_drivers_renew_in_no_order(place: Place) -> None:
    """Tasks that write the same keys at once, in opposite orders: the newest of all stays."""
    place.execute(_PRICES)
    rows = [price(f"m{n:04}", n, f"a{n % 7}") for n in range(700)]
    tasks = [place.task(chunk="50", **_NEWEST) for _ in range(2)]
    at_once(tasks, batches_of(rows[::2]), batches_of(rows[1::2][::-1]))
    assert sum(task.counts.handled for task in tasks) == len(rows)
    assert prices(place) == [(f"a{n}", 693 + n, 6930 + 10 * n, None) for n in range(7)]


# ---- What others hold --------------------------------------------------------------------------


def test_a_live_claim_is_waited_for(place: Place) -> None:
    """Rows of others are written meanwhile; the outcome of the other worker decides."""
    done, failed = place.hold("done", "1m"), place.hold("failed", "1m")
    task = place.task()
    thread = threading.Thread(
        target=task.run, args=[batches_of([payment("done"), payment("x"), payment("failed")])]
    )
    thread.start()
    wait_until(lambda: place.ids() == ["x"])
    place.ledger.complete(done)
    place.ledger.fail(failed, "no")
    thread.join(LIMIT_S)
    assert place.ids() == ["failed", "x"]
    assert (task.counts.handled, task.counts.duplicates_ledger) == (2, 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("retry", (2, 0, 0)), ("hold", (1, 1, 0)), ("dead_letter", (1, 0, 1))],
)
def test_a_claim_that_has_run_out(here: Place, policy: str, expected: tuple[int, int, int]) -> None:
    """What a leased worker left in doubt: taken over, or counted as the policy says."""
    here.hold("a", "1ms")
    wait_until(lambda: here.ledger.now() > (here.record("a").lease_until or 0.0))
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


def test_two_drivers_at_once(place: Place) -> None:
    """The same rows in opposite orders and chunks: each is there once, and nobody deadlocks."""
    rows = [payment(f"m{n:04}") for n in range(1_500)]
    tasks = [place.task(chunk="100"), place.task(chunk="130")]
    at_once(tasks, batches_of(rows), batches_of(rows[::-1]))
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
    wait_until(lambda: here.ids() == ["x"])
    channel.stop(0.0)
    thread.join(LIMIT_S)
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


def test_several_tasks_renew_in_order(spark: "SparkSession", place: Place) -> None:
    """Messages of one key meet in one task, and the last by id wins; copies meet in the ledger."""
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


def rows_of(spark: "SparkSession", folder: Path, tables: str) -> list["SparkRow"]:
    """What a pipeline file with these tables makes of its source."""
    file = folder / "pipeline.toml"
    file.write_text(
        '[pipeline]\nname = "odd"\nconsumer = "odd"\nledger = "sqlite:///ledger.db"\n'
        f'mode = "rows"\ntable = "odd"\ncheckpoint = "c"\nquarantine = "q"\n{tables}'
    )
    messages = read_messages(spark, read_config(file))
    query = messages.writeStream.format("memory").queryName("odd").trigger(availableNow=True)
    assert query.start().awaitTermination(120)
    return spark.table("odd").orderBy("id").collect()


_LINES = """{"id": "a", "n": 1, "dropped": 1.50, "n": 2}

[{"id": "b", "dropped": "x"}, {"id": "c"}]
{"id": 17, "dropped": [1]}
{"id": "d", "n": "text", "dropped": 1}
"""
_OF_LINES = [
    ("17", '{"id": 17, "dropped": [1]}', ID_IS_NO_STRING),
    ("a", '{"id": "a", "n": 1, "dropped": 1.50, "n": 2}', None),
    ("b", '{"dropped":"x","id":"b"}', None),
    ("c", '{"id":"c"}', None),
    ("d", '{"id": "d", "n": "text", "dropped": 1}', "row does not fit the schema"),
]


@pytest.mark.parametrize(
    ("kind", "options", "text", "expected"),
    [
        ("json", "", _LINES, _OF_LINES),
        (
            "json",
            "multiLine = true",
            '[{"id": "a"},\n {"id": "b"}]',
            [("a", '{"id":"a"}', None), ("b", '{"id":"b"}', None)],
        ),
        (
            "csv",
            "",
            "a,1\nb,1,dropped\n",
            [("a", '{"id":"a","n":1}', None), ("b", "b,1,dropped", "not csv")],
        ),
    ],
)
def test_what_the_schema_drops(
    spark: "SparkSession",
    tmp_path: Path,
    kind: str,
    options: str,
    text: str,
    expected: list[tuple[str | None, str, str | None]],
) -> None:
    """It is in the original row, which the quarantine has, and not in what the file's expressions
    see, which is the columns of the schema alone.
    """
    (tmp_path / "rows").write_text(text)
    everything = "to_json(struct(*), map('ignoreNullFields', 'false'))"
    rows = rows_of(
        spark,
        tmp_path,
        f'[source]\nformat = "{kind}"\npath = "rows"\nschema = "id STRING, n INT"\n'
        f'[source.options]\n{options}\n[message]\nid = "id"\n[columns]\n'
        f'all = "{everything}"\nfew = "to_json(struct(* EXCEPT (n), \'(*\' AS t))"\n'
        'file = "_metadata.file_name"\n',
    )
    for row in rows:
        assert row.file == "rows"
        assert {*json.loads(row.all)} == {"id", "n"}
        assert {*json.loads(row.few)} - {"id"} == {"t"}
    told = [(row.id, row.oncely_row, row.oncely_broken) for row in rows]
    assert told == expected


def test_a_source_whose_columns_need_backticks(spark: "SparkSession", tmp_path: Path) -> None:
    """A pipeline file names them as Spark SQL does; an id that is a number is found there, too."""
    (tmp_path / "in.json").write_text(
        '{"the `id`": "m1", "a.b": 1, "a`b": "x"}\n{"the `id`": 17, "a.b": 2, "a`b": "y"}\n'
    )
    bad, good = rows_of(
        spark,
        tmp_path,
        '[source]\nformat = "json"\npath = "in.json"\n'
        '[message]\nid = "`the ``id```"\n'
        '[columns]\n"x`y" = "`a.b`"\nz = "`a``b`"\n',
    )
    assert (good["id"], good["x`y"], good["z"], good["oncely_broken"]) == ("m1", 1, "x", None)
    assert json.loads(good["oncely_row"]) == {"the `id`": "m1", "a.b": 1, "a`b": "x"}
    assert (bad["oncely_broken"], json.loads(bad["oncely_row"])["the `id`"]) == (
        ID_IS_NO_STRING,
        17,
    )


def test_how_many_tasks_there_are(spark: "SparkSession") -> None:
    """As many as `partitions` says, and no more than `writers`."""
    ids = spark.range(9).selectExpr("cast(id AS STRING) AS id")
    for partitions, writers, number in ((5, None, 5), (5, 2, 2), (2, 5, 2), (None, 1, 1)):
        assert spread(ids, partitions, writers=writers).rdd.getNumPartitions() == number
    assert spread(ids).rdd.getNumPartitions() == 2 * spark.sparkContext.defaultParallelism
    for partitions, writers in ((0, None), (None, -1)):
        with pytest.raises(ConfigError, match="is not a whole number of 1 or more"):
            spread(ids, partitions, writers=writers)
