"""Mode `rows`: what is checked before a row is written, and the line that a mistake gets."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructType,
)
from sqlalchemy import Engine, text
from tests.conformance.conftest import url_of
from tests.spark.payments import NUMBERED
from tests.turns import in_turn

from oncely.core.errors import ConfigError
from oncely.spark.modes.target_table import open_target, work_engine
from oncely.spark.sink.sink_options import read_options

PAYMENTS = (
    "CREATE TABLE payments (id VARCHAR(64) PRIMARY KEY, account VARCHAR(20) NOT NULL,"
    " amount INTEGER, note VARCHAR(20) DEFAULT 'x' NOT NULL)"
)


def schema(**types: DataType) -> StructType:
    made = StructType().add("id", types.pop("id", StringType()))
    for name, type_ in types.items():
        made.add(name, type_)
    return made


@pytest.fixture(params=in_turn("database of checked rows", ["sqlite", "postgresql", "mysql"]))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database with a table of the user's own."""
    made = work_engine(url_of(request.param, request, tmp_path))
    with made.begin() as connection:
        connection.execute(text(PAYMENTS))
    yield made
    made.dispose()


def test_what_fits(engine: Engine) -> None:
    """A column that may be null, or has a default, may be missing."""
    fitting = schema(account=StringType(), amount=LongType())
    open_target(engine, "payments", ["id"]).check(fitting)
    open_target(engine, "payments").check(schema(account=StringType()))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (schema(accont=StringType()), "column accont: .* did you mean 'account'"),
        (schema(amount=IntegerType()), "no column 'account', which the table payments requires"),
        (schema(account=LongType()), "'account' is bigint.*cast\\(account AS STRING\\)"),
        (
            schema(account=StringType(), amount=DecimalType(5, 2)),
            "'amount' is decimal\\(5,2\\), and INTEGER.*cast\\(amount AS BIGINT\\)",
        ),
        (schema(account=ArrayType(StringType())), "'account' is array; write \"to_json"),
        (schema(id=LongType(), account=StringType()), "'id' is bigint.*cast\\(id AS STRING\\)"),
        (StructType().add("account", StringType()), "no column 'id'"),
    ],
)
def test_what_does_not(engine: Engine, given: StructType, line: str) -> None:
    """One line for each mistake, and what to type."""
    with pytest.raises(ConfigError, match=line):
        open_target(engine, "payments").check(given)


def test_a_boolean_for_an_integer(engine: Engine) -> None:
    """MariaDB's BOOLEAN is one; PostgreSQL would refuse each row."""
    table = open_target(engine, "payments")
    given = schema(account=StringType(), amount=BooleanType())
    if engine.dialect.name != "postgresql":
        table.check(given)
        return
    line = "'amount' is boolean, and INTEGER.*cast\\(amount AS BIGINT\\)"
    with pytest.raises(ConfigError, match=line):
        table.check(given)


def test_ids_alone(engine: Engine) -> None:
    """They are not rows of a table that has no place for them."""
    numbered = NUMBERED[engine.dialect.name]
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE numbered (id {numbered}, amount INT, day DATE)"))
    line = r"no column but 'id'.* numbered; add one of amount, day$"
    with pytest.raises(ConfigError, match=line):
        open_target(engine, "numbered").check(schema())
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seen (id VARCHAR(64) PRIMARY KEY)"))
    open_target(engine, "seen").check(schema())


def test_tables_and_keys(engine: Engine) -> None:
    """A table that is not there or is the ledger's, and a key that is none."""
    with pytest.raises(ConfigError, match="no table 'payment'; did you mean 'payments'"):
        open_target(engine, "payment")
    with pytest.raises(ConfigError, match="no table 'orders'; create it first"):
        open_target(engine, "orders")
    with pytest.raises(ConfigError, match="is the ledger's own"):
        open_target(engine, "processed_messages")
    fitting = schema(account=StringType())
    with pytest.raises(ConfigError, match="neither the primary key nor a unique"):
        open_target(engine, "payments", ["account"]).check(fitting)
    for name in ("id", "amount", "amuont"):
        line = f"sequence_by='{name}' is not a column that is updated; name one of account"
        with pytest.raises(ConfigError, match=line):
            open_target(engine, "payments", ["id"], name).check(fitting)


def test_options_that_are_read() -> None:
    """A schema may stand before the table; a key may have several columns."""
    rows = {"mode": "rows", "consumer": "tests", "ledger": "sqlite:///unused"}
    read = read_options({**rows, "table": "shop.payments", "upsert": "account, day"})
    assert (read.table, read.upsert, read.handler) == ("shop.payments", ("account", "day"), "")


def test_stores_without_transactions() -> None:
    """Rows and records cannot be stored together in Redis."""
    with pytest.raises(ConfigError, match="redis"):
        work_engine("redis://localhost:6379/0")
