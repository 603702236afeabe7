"""Mode `rows` into a table of Delta Lake or Apache Iceberg: a batch is one commit."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.utils.config import Config
from tests.spark.conftest import drain

from oncely import ConfigError, Ledger, OncelyError, State, lake
from oncely.spark import foreach_batch, process
from oncely.spark.pipeline.config import read_config
from oncely.spark.pipeline.run import run_pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("amount", pa.int32(), nullable=False),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("parts", pa.list_(pa.string())),
        pa.field("time", pa.date32()),
        pa.field("note", pa.string()),
    ]
)
Frame = Callable[..., "DataFrame"]
pytestmark = pytest.mark.in_turn("rows in lakes")


class Target:
    """A table, as its own client sees it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, str(folder / "orders")
        self.location = f"delta:{self.path}" if kind == "delta" else "iceberg:shop.sales.orders"

    @property
    def catalog(self) -> Catalog:
        return load_catalog("shop")

    def create(self, schema: pa.Schema = SCHEMA) -> "Target":
        if self.kind == "delta":
            write_deltalake(self.path, schema.empty_table())
        else:
            self.catalog.create_namespace("sales")
            self.catalog.create_table("sales.orders", schema=schema)
        return self

    def load(self) -> Any:
        is_delta = self.kind == "delta"
        return DeltaTable(self.path) if is_delta else self.catalog.load_table("sales.orders")

    def rows(self) -> list[dict[str, Any]]:
        table = self.load()
        read = table.to_pyarrow_table() if self.kind == "delta" else table.scan().to_arrow()
        return sorted(read.to_pylist(), key=lambda row: str(row["id"]))

    def commits(self) -> int:
        table = self.load()
        return table.version() if self.kind == "delta" else len(table.metadata.snapshots)


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog in the environment, which pyiceberg reads when it is imported."""
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())


@pytest.fixture(params=["delta", "iceberg"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return Target(request.param, tmp_path)


@pytest.fixture
def settings(ledger_url: str, target: Target, tmp_path: Path) -> dict[str, Any]:
    told = {"consumer": "tests", "ledger": ledger_url, "mode": "rows", "table": target.location}
    return {**told, "quarantine": str(tmp_path / "quarantine"), "partitions": 2}


def quarantined(settings: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    rows = pq.read_table(settings["quarantine"]).to_pylist()
    return {row["reason"]: (row["id"], json.loads(row["row"])) for row in rows}


def test_each_row_once(
    target: Target, settings: dict[str, Any], spark: "SparkSession", ledger: Ledger
) -> None:
    """New rows are one commit; copies and known ones are duplicates; what does not fit is set
    aside as it was. A column that the rows do not have is null, and a column may have any name.
    """
    target.create()
    rows = [(f"m{n}", n, Decimal("1.25")) for n in (*range(9), 3)]
    bad = [
        ("null", None, None),
        ("big", 2**40, None),
        ("cent", 1, Decimal("0.125")),
        (None, 1, None),
    ]
    messages = spark.createDataFrame(
        [*rows, *bad], "id string, amount bigint, price decimal(12,4)"
    ).selectExpr(
        "*", "TIMESTAMP '2026-01-02 03:04:05' at", "array('x') parts", "DATE '2026-01-02' time"
    )
    report = process(messages, **settings)
    assert (report.received, report.handled, report.duplicates) == (14, 9, 1)
    assert report.as_dict()["quarantined"] == {
        "missing amount": 1,
        "amount does not fit into int": 1,
        "price does not fit into decimal(10,2)": 1,
        "missing id": 1,
    }
    assert [row["id"] for row in target.rows()] == [f"m{n}" for n in range(9)]
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    first = {"id": "m0", "amount": 0, "price": Decimal("1.25"), "at": moment, "parts": ["x"]}
    assert target.rows()[0] == {**first, "time": moment.date(), "note": None}
    id_, row = quarantined(settings)["amount does not fit into int"]
    assert (id_, row["amount"], row["time"]) == ("big", 2**40, "2026-01-02")
    commits = target.commits()
    again = process(messages, **settings)
    assert (again.handled, again.duplicates, again.quarantined) == (0, 10, 4)
    assert (target.commits(), ledger.counts()[("tests", State.COMPLETED)]) == (commits, 9)


def test_upsert(target: Target, settings: dict[str, Any], spark: "SparkSession") -> None:
    """Rows replace those with the same key, of this batch and of earlier ones; without the message
    id where the table has none.
    """
    columns = [pa.field("account", pa.int64()), pa.field("amount", pa.int32())]
    target.create(pa.schema(columns))
    settings["upsert"] = ["account"]
    for rows in (
        [("a", 1, 1), ("b", 2, 2), ("c", 1, 3)],
        [("d", 1, 4), ("e", 3, 5)],
        [("f", None, 6)],
    ):
        process(spark.createDataFrame(rows, "id string, account int, amount int"), **settings)
    table = target.load()
    read = table.to_pyarrow_table() if target.kind == "delta" else table.scan().to_arrow()
    assert sorted(read.to_pylist(), key=str) == [
        {"account": 1, "amount": 4},
        {"account": 2, "amount": 2},
        {"account": 3, "amount": 5},
    ]
    assert quarantined(settings)["missing account"][0] == "f"
    with pytest.raises(ConfigError, match=r"no column 'amount', which .* requires for an upsert"):
        process(spark.createDataFrame([("g", 1)], "id string, account int"), **settings)


@pytest.mark.parametrize("lands", [True, False])
def test_interrupted(
    target: Target,
    settings: dict[str, Any],
    frame: Frame,
    ledger: Ledger,
    lands: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the table did not answer ends the run, with one line. The next one asks the table, and
    writes the batch only if it is not there: its rows are neither twice there nor in doubt.
    """
    target.create(pa.schema([SCHEMA.field("id")]))
    name = f"write_{target.kind}"
    write = getattr(lake, name)

    def lost(*args: Any, **options: Any) -> None:
        if lands:
            write(*args, **options)
        raise OSError("the line is cut")

    with monkeypatch.context() as patched:
        patched.setattr(lake, name, lost)
        with pytest.raises(OncelyError, match=r"table: .* cannot be written: OSError: the line is"):
            process(frame("a", "b").select("id"), **settings)
    report = process(frame("a", "c").select("id"), **settings)
    assert (report.received, report.handled, report.duplicates) == (4, 3, 1)
    assert [row["id"] for row in target.rows()] == ["a", "b", "c"]
    assert {state for _, state in ledger.counts()} == {State.COMPLETED}


def test_new_table(ledger_url: str, tmp_path: Path, frame: Frame, monkeypatch: Any) -> None:
    """A stream creates a table of Delta at a relative path. The format itself refuses it."""
    monkeypatch.chdir(tmp_path)
    told: dict[str, Any] = {
        "consumer": "tests",
        "ledger": ledger_url,
        "mode": "rows",
        "table": "delta:new/orders",
    }
    messages = frame("a", "b", "a")
    messages.coalesce(1).write.parquet("input")
    with pytest.raises(Exception, match=r"foreachBatch\(oncely.spark.foreach_batch\(table=\.\.\."):
        messages.write.format("oncely").options(**told).mode("append").save()
    stream = messages.sparkSession.readStream.schema(messages.schema).parquet("input")
    drain(stream.writeStream.foreachBatch(foreach_batch(**told)), tmp_path / "checkpoint")
    table = DeltaTable(tmp_path / "new" / "orders").to_pyarrow_table()
    assert sorted(table.column("id").to_pylist()) == ["a", "b"]
    assert table.column_names == ["id", "body", "source"]


_PIPELINE = """
[pipeline]
name = "orders"
consumer = "orders"
ledger = "sqlite:///ledger.db"
mode = "rows"
table = "{table}"
checkpoint = "checkpoint"
quarantine = "quarantine"

[source]
format = "json"
path = "input"
schema = "id STRING, n BIGINT"

[message]
id = "id"

[columns]
amount = "n"
"""


def test_pipeline(target: Target, tmp_path: Path, spark: "SparkSession", ledger: Ledger) -> None:
    """A pipeline file names the table; one of Delta relative to the file. A lost checkpoint brings
    only duplicates.
    """
    target.create()
    (tmp_path / "input").mkdir()
    lines = [{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "a", "n": 1}, {"id": "c"}]
    (tmp_path / "input" / "1.json").write_text("\n".join(map(json.dumps, lines)))
    file = tmp_path / "pipeline.toml"
    table = "delta:orders" if target.kind == "delta" else target.location
    file.write_text(_PIPELINE.format(table=table))
    report = run_pipeline(read_config(file))
    assert (report.received, report.handled, report.duplicates, report.quarantined) == (4, 2, 1, 1)
    assert [(row["id"], row["amount"]) for row in target.rows()] == [("a", 1), ("b", 2)]
    shutil.rmtree(tmp_path / "checkpoint")
    again = run_pipeline(read_config(file))
    assert (again.handled, again.duplicates, again.quarantined) == (0, 3, 1)
    assert len(target.rows()) == ledger.counts()[("orders", State.COMPLETED)] == 2
    file.write_text(_PIPELINE.format(table=table).replace('"n"', '"id"'))
    shutil.rmtree(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=r"pipeline.toml: column 'amount' is string, and int"):
        run_pipeline(read_config(file))


_MISTAKES: list[tuple[str, dict[str, str], str]] = [
    ("'1' amount", {}, "column 'amount' is string, and int in the table .*AS INT"),
    ("1 amuont", {}, "column amuont: there is no such column in the table .* mean 'amount'"),
    ("'x' note", {}, "has no column 'amount', which the table .* requires"),
    ("1 amount", {"table": "iceberg:shop.sales.x"}, "'shop' has no table 'sales.x'; create it"),
    ("1 amount", {"table": "iceberg:nope.sales.x"}, "catalog 'nope' cannot be used: .*NOPE__URI"),
    ("1 amount", {"table": "iceberg:orders"}, 'names no table; .*"iceberg:CATALOG.NAMESPACE.T'),
    ("1 amount", {"upsert": "id", "sequence_by": "at"}, "sequence_by: .* written last; drop it"),
    ("1 amount", {"quarantine": "orders/q"}, "quarantine: .* is in the folder of option table"),
]


def test_mistakes(tmp_path: Path, ledger_url: str, spark: "SparkSession", monkeypatch: Any) -> None:
    """What is wrong is said before anything is written."""
    monkeypatch.chdir(tmp_path)
    target = Target("delta", tmp_path).create()
    Target("iceberg", tmp_path).create()
    told = {"consumer": "tests", "ledger": ledger_url, "mode": "rows", "table": target.location}
    for column, options, said in _MISTAKES:
        with pytest.raises(ConfigError, match=said) as caught:
            process(spark.sql(f"SELECT 'a' id, {column}"), **told | options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert target.rows() == []
