"""Mode `rows` into a table of Delta Lake or Apache Iceberg: a batch is one commit."""

import json
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.utils.config import Config
from tests.lake.tables import KEYS, Orders

from oncely import ConfigError, Ledger, OncelyError, State, lake
from oncely._util.crash_points import watched_by
from oncely.spark import process

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.in_turn("batches")
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("amount", pa.int32(), nullable=False),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("time", pa.date32()),
        pa.field("body", pa.string()),
        pa.field("note", pa.string()),
    ]
)


@pytest.fixture(params=KEYS)
def orders(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Orders:
    """A table whose catalog is in the environment, which pyiceberg reads when it is imported."""
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", f"file://{tmp_path}")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    return Orders(request.param, tmp_path)


@pytest.fixture
def settings(ledger_url: str, orders: Orders, tmp_path: Path) -> dict[str, Any]:
    told = {"consumer": "tests", "ledger": ledger_url, "mode": "rows", "table": orders.location}
    return {**told, "quarantine": str(tmp_path / "quarantine"), "partitions": 2}


def set_aside(settings: dict[str, Any]) -> dict[str, Any]:
    """The quarantined rows, by their reasons."""
    rows = pq.read_table(settings["quarantine"]).to_pylist()
    return {row["reason"]: json.loads(row["row"]) for row in rows}


def test_each_row_once(
    orders: Orders, settings: dict[str, Any], spark: "SparkSession", ledger: Ledger
) -> None:
    """Copies and known rows are duplicates, and what does not fit is set aside as it was. A column
    that the rows do not have is null, and one with a message's name is as any other.
    """
    orders.create(SCHEMA)
    rows = [(f"m{n}", n, Decimal("1.25")) for n in range(9)] + [("m3", 99, None)]
    unfit = [
        ("null", None, None),
        ("big", 2**40, None),
        ("c", 1, Decimal("0.125")),
        (None, 1, None),
    ]
    messages = spark.createDataFrame(rows + unfit, "id string, amount bigint, price decimal(12,4)")
    messages = messages.selectExpr("*", "DATE '2026-01-02' time", "string(amount) body")
    report = process(messages, **settings)
    assert (report.received, report.handled, report.duplicates) == (14, 9, 1)
    told = ("amount does not fit into int", "price does not fit into decimal(10,2)")
    reasons = ("missing amount", *told, "missing id")
    assert report.as_dict()["quarantined"] == dict.fromkeys(reasons, 1)
    assert set_aside(settings)[told[0]]["amount"] == 2**40
    assert orders.ids() == [f"m{n}" for n in range(9)]
    first = {"id": "m0", "amount": 0, "price": Decimal("1.25"), "note": None}
    written = {**first, "time": date(2026, 1, 2), "body": "0"}
    assert orders.read().sort_by("id").to_pylist()[0] == written
    again = process(messages, **settings)
    assert (again.handled, again.duplicates, again.quarantined) == (0, 10, 4)
    assert len(orders.ids()) == ledger.counts()[("tests", State.COMPLETED)] == 9


def test_upsert(orders: Orders, settings: dict[str, Any], spark: "SparkSession") -> None:
    """Rows replace those with the same key, of this batch and of earlier ones; without the message
    id where the table has none.
    """
    orders.create(pa.schema([("account", pa.int64()), ("amount", pa.int32())]))
    batches = [[("a", 1, 1), ("b", 2, 2), ("c", 1, 3)], [("d", 1, 4), ("e", None, 5)]]
    for rows in batches:
        given = spark.createDataFrame(rows, "id string, account int, amount int")
        process(given, upsert=["account"], **settings)
    assert sorted(map(tuple, map(dict.values, orders.read().to_pylist()))) == [(1, 4), (2, 2)]
    assert [*set_aside(settings)] == ["missing account"]
    with pytest.raises(ConfigError, match=r"no column 'amount', which .* requires for an upsert"):
        process(given.drop("amount"), upsert=["account"], **settings)


@pytest.mark.in_turn("batches")
@pytest.mark.parametrize("lands", [True, False])
def test_lost_answer(
    orders: Orders,
    settings: dict[str, Any],
    frame: Callable[..., "DataFrame"],
    ledger: Ledger,
    lands: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the table ends the run, in one line. The next one asks the table, and writes the
    batch only if it is not there.
    """
    orders.create(pa.schema([SCHEMA.field("id")]))
    write = getattr(lake, f"write_{orders.kind}")

    def lost(*args: Any, **options: Any) -> None:
        if lands:
            write(*args, **options)
        raise OSError("the line is cut")

    with monkeypatch.context() as patched:
        patched.setattr(lake, f"write_{orders.kind}", lost)
        with pytest.raises(OncelyError, match=r"table: .* cannot be written: OSError: the line is"):
            process(frame("a", "b").select("id"), **settings)
    report = process(frame("a", "c").select("id"), **settings)
    assert (report.received, report.handled, report.duplicates) == (4, 3, 1)
    assert orders.ids() == ["a", "b", "c"]
    assert {state for _, state in ledger.counts()} == {State.COMPLETED}


@pytest.mark.in_turn("batches")
def test_a_table_that_does_not_know(
    orders: Orders,
    settings: dict[str, Any],
    frame: Callable[..., "DataFrame"],
    ledger: Ledger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that may be there are held, and are not written again, until somebody settles them."""
    orders.create(pa.schema([SCHEMA.field("id")]))

    def end(point: str) -> None:
        if point == "after_batch_handler":
            raise KeyboardInterrupt

    with watched_by(end), pytest.raises(KeyboardInterrupt):
        process(frame("a", "b").select("id"), **settings)
    with monkeypatch.context() as patched:
        patched.setattr(lake, "probe", lambda *_, **__: "unknown")
        for _ in range(2):
            assert process(frame("a", "b").select("id"), **settings).in_doubt > 0
    assert orders.ids() == ["a", "b"]
    ledger.reset(next(ledger.scan("tests/batches", State.PROCESSING)).key)
    assert process(frame("a", "c").select("id"), **settings).handled == 3
    assert orders.ids() == ["a", "b", "c"]


_MISTAKES: list[tuple[str, dict[str, str], str]] = [
    ("'1' amount", {}, "column 'amount' is string, and int in the table .*AS INT"),
    ("1 amuont", {}, "column amuont: there is no such column in the table .* mean 'amount'"),
    ("'x' note", {}, "has no column 'amount', which the table .* requires"),
    ("1 amount", {"table": "iceberg:shop.shop.x"}, "'shop' has no table 'shop.x'; create it"),
    ("1 amount", {"table": "iceberg:nope.shop.x"}, "catalog 'nope' cannot be used: .*NOPE__URI"),
    ("1 amount", {"table": "iceberg:orders"}, 'names no table; .*"iceberg:CATALOG.NAMESPACE.T'),
    ("1 amount", {"upsert": "amuont"}, "option upsert: amuont: there is no .* mean 'amount'"),
    ("1 amount", {"upsert": "id", "sequence_by": "at"}, "sequence_by: .* written last; drop it"),
    ("1 amount", {"table": "delta:/a", "quarantine": "/a/q"}, "is in the folder of option table"),
]


@pytest.mark.parametrize("orders", ["iceberg"], indirect=True)
def test_mistakes(orders: Orders, settings: dict[str, Any], spark: "SparkSession") -> None:
    """What is wrong is said before anything is written, and what to write instead."""
    orders.create(SCHEMA)
    for column, options, said in _MISTAKES:
        with pytest.raises(ConfigError, match=said) as caught:
            process(spark.sql(f"SELECT 'a' id, {column}"), **settings | options)
        assert "\n" not in str(caught.value)
    del settings["partitions"]
    writer = spark.sql("SELECT 'a' id, 1 amount").write.format("oncely").mode("append")
    with pytest.raises(Exception, match=r"foreachBatch\(oncely.spark.foreach_batch\(table="):
        writer.options(**settings).save()
    assert orders.ids() == []
