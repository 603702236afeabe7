"""Upserts on every database: repeated, at once, and with columns that do not fit."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    create_engine,
    make_url,
    select,
)
from sqlalchemy.dialects import oracle
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncely.core.errors import ConfigError
from oncely.spark.modes.target_table import refusal
from oncely.upsert import upsert

THREADS = 8


class Base(DeclarativeBase):
    """The mapped classes of these tests."""


class Balance(Base):
    """A number of its own, and a key that the outside knows."""

    __tablename__ = "balances"
    __table_args__ = (UniqueConstraint("account", "day"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(String(50))
    day: Mapped[int]
    amount: Mapped[int]
    note: Mapped[str] = mapped_column("a note", String(50), default="none")


BALANCES = Base.metadata.tables["balances"]
KEY = ("account", "day")

PLAIN = MetaData()
BY_PRIMARY_KEY = Table(
    "by_primary_key", PLAIN, Column("name", String(50), primary_key=True), Column("n", Integer)
)
BY_INDEX = Table(
    "by_index",
    PLAIN,
    Column("name", String(50), nullable=False),
    Column("n", Integer, nullable=False),
    Index("names", "name", unique=True),
    Index("numbers", "n"),
)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a file that no other test has."""
    return f"sqlite:///{tmp_path / 'upsert.db'}"


@pytest.fixture(params=["sqlite_url", "postgresql_url", "mysql_url"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tables of these tests, empty, in each kind of database."""
    url = make_url(request.getfixturevalue(request.param))
    driver = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
    backend = url.get_backend_name()
    engine = create_engine(url.set(drivername=f"{backend}+{driver[backend]}"), pool_size=THREADS)
    Base.metadata.create_all(engine)
    PLAIN.create_all(engine)
    yield engine
    engine.dispose()


def balance(account: str, amount: int, **more: Any) -> dict[str, Any]:
    return {"account": account, "day": 1, "amount": amount, **more}


def rows_of(engine: Engine, *columns: str) -> list[tuple[Any, ...]]:
    """What the table of balances holds, in the order of the accounts."""
    query = select(*(BALANCES.c[name] for name in columns)).order_by(BALANCES.c.account)
    with engine.begin() as connection:
        return [tuple(row) for row in connection.execute(query)]


@pytest.mark.parametrize("table", [Balance, BALANCES], ids=["class", "table"])
@pytest.mark.parametrize("opened", [Engine.begin, Session], ids=["connection", "session"])
def test_twice(engine: Engine, table: Any, opened: Callable[[Engine], Any]) -> None:
    """A row that is written again is one row with the newest values, and the caller commits."""
    for amount in (1, 2, 2):
        with opened(engine) as connection:
            upsert(connection, table, balance("a", amount), KEY)
            connection.commit()
    with opened(engine) as connection:
        upsert(connection, table, balance("a", 3), KEY)
        connection.rollback()
    assert rows_of(engine, "account", "amount") == [("a", 2)]


def test_many(engine: Engine) -> None:
    """Many rows in one call: those that are there are renewed, the others are inserted. Of rows
    with one key the last counts.
    """
    with engine.begin() as connection:
        upsert(connection, BALANCES, [balance("a", 1), balance("b", 1)], KEY)
        upsert(connection, BALANCES, [balance("b", 2), *(balance("c", n) for n in (1, 3, 2))], KEY)
        upsert(connection, BALANCES, [], KEY)
    assert rows_of(engine, "account", "amount") == [("a", 1), ("b", 2), ("c", 2)]


@pytest.mark.parametrize(
    ("update", "amount", "note"),
    [
        (None, 2, "second"),
        (["amount"], 2, "first"),
        ("a note", 1, "second"),
        (["amount", "a note"], 2, "second"),
        ([], 1, "first"),
    ],
)
def test_what_is_renewed(
    engine: Engine, update: Sequence[str] | None, amount: int, note: str
) -> None:
    """Only the columns of `update` are renewed: all that are given, or none where it is empty."""
    with engine.begin() as connection:
        for n, text in ((1, "first"), (2, "second")):
            upsert(connection, BALANCES, balance("a", n, **{"a note": text}), KEY, update)
    assert rows_of(engine, "amount", "a note") == [(amount, note)]


def test_columns_that_are_not_given(engine: Engine) -> None:
    """A column that is not given has its default at first, and stays as it is afterwards."""
    with engine.begin() as connection:
        upsert(connection, BALANCES, balance("a", 1), KEY)
        upsert(connection, BALANCES, balance("b", 1, **{"a note": "mine"}), KEY)
        upsert(connection, BALANCES, [balance("a", 2), balance("b", 2)], KEY)
    assert rows_of(engine, "amount", "a note") == [(2, "none"), (2, "mine")]


@pytest.mark.parametrize("table", [BY_PRIMARY_KEY, BY_INDEX], ids=["primary key", "index"])
def test_other_keys(engine: Engine, table: Table) -> None:
    """A primary key and a unique index are keys as well; one column may be named as a string."""
    with engine.begin() as connection:
        for n in (1, 2):
            upsert(connection, table, {"name": "a", "n": n}, "name")
        assert connection.execute(select(table.c.n)).scalars().all() == [2]


def test_key_alone(engine: Engine) -> None:
    """Where nothing is given beside the key, the row is inserted once."""
    with engine.begin() as connection:
        for _ in range(2):
            upsert(connection, BY_PRIMARY_KEY, {"name": "a"}, "name")
        assert connection.execute(select(BY_PRIMARY_KEY)).all() == [("a", None)]


def test_other_mistakes_are_raised(engine: Engine) -> None:
    """With nothing to renew, an error that is not about the key is still an error."""
    with engine.begin() as connection, pytest.raises(IntegrityError):
        upsert(connection, BY_INDEX, {"name": "a", "n": None}, "name", update=[])


CARDS = Table(
    "cards",
    PLAIN,
    Column("holder", String(50), primary_key=True),
    Column("number", String(50), unique=True),
    Column("limit", Integer),
)


@pytest.mark.parametrize(
    ("update", "sequence_by"), [(None, None), (["limit"], None), ([], None), (None, "limit")]
)
def test_another_unique_key(
    engine: Engine, update: Sequence[str] | None, sequence_by: str | None
) -> None:
    """A row with another key is never overwritten because of a value that only it may have: that is
    an error on every database, also where the Table does not declare the other key.
    """
    undeclared = Table(
        "cards",
        MetaData(),
        *(Column(each.name, each.type, primary_key=each.primary_key) for each in CARDS.columns),
    )
    anna = {"holder": "anna", "number": "17", "limit": 5}
    for table in (CARDS, undeclared):
        with engine.begin() as connection:
            for limit in (5, 6):
                upsert(connection, table, {**anna, "limit": limit}, "holder", update, sequence_by)
        ben = {**anna, "holder": "ben", "limit": 9}
        with pytest.raises(IntegrityError) as refused, engine.begin() as connection:
            upsert(connection, table, [ben, {**anna, "limit": 7}], "holder", update, sequence_by)
        with engine.begin() as connection:
            found = connection.execute(select(CARDS)).all()
            connection.execute(CARDS.delete())
        assert found == [("anna", "17", 5 if update == [] else 6)]
        # Of Spark's rows it is this one that is refused, and not the chunk.
        assert "unique" in (refusal(refused.value) or "").lower()


def test_many_at_once(engine: Engine) -> None:
    """Threads that write the same rows in opposite orders do not deadlock."""
    barrier = Barrier(THREADS)
    rows = [balance(f"a{number}", 1) for number in range(20)]

    def write(number: int) -> None:
        for day in range(5):
            with engine.begin() as connection:
                barrier.wait(60)
                todays = [row | {"day": day} for row in rows]
                upsert(connection, BALANCES, todays[:: 1 if number % 2 else -1], KEY)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(THREADS)))
    assert len(rows_of(engine, "id")) == 5 * len(rows)


MISTAKES: dict[str, tuple[Any, Any, str]] = {
    "unknown column": (balance("a", 1, color="red"), {}, "no column 'color'"),
    "unknown key": (balance("a", 1), {"key": ["acount"]}, "no column 'acount'"),
    "unknown update": (balance("a", 1), {"update": ["color"]}, "no column 'color'"),
    "key not given": ({"account": "a", "amount": 1}, {}, r"the rows lack \['day'\]"),
    "half of a key": (balance("a", 1), {"key": "account"}, "nor a unique constraint"),
    "no key": ({"name": "a"}, {"key": [], "table": BY_INDEX}, "nor a unique constraint"),
    "an index alone": ({"name": "a", "n": 1}, {"key": "n", "table": BY_INDEX}, "nor a unique"),
    "None in a key": (
        [balance("a", 1), balance("a", 1) | {"day": None}],
        {},
        "'day' is None in a row; it needs a value",
    ),
    "different columns": (
        [balance("a", 1), {"account": "b", "day": 1}],
        {},
        r"one row has the columns \['account', 'day', 'amount'\], another \['account', 'day'\]",
    ),
    "no table": (balance("a", 1), {"table": "balances"}, "neither a Table nor a mapped class"),
    "no connection": (balance("a", 1), {"connection": object()}, "run_sync"),
}


@pytest.mark.parametrize(("rows", "changed", "reason"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(rows: Any, changed: dict[str, Any], reason: str) -> None:
    """What does not fit is said before anything is asked of the database."""
    with create_engine("sqlite://").connect() as connection:
        call = {"connection": connection, "table": BALANCES, "rows": rows, "key": KEY} | changed
        with pytest.raises(ConfigError, match=reason):
            upsert(**call)


def test_other_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A database that has no such statement is named."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        monkeypatch.setattr(connection, "dialect", oracle.dialect())  # type: ignore[no-untyped-call]
        with pytest.raises(ConfigError, match="oracle is not supported"):
            upsert(connection, BALANCES, balance("a", 1), KEY)


def test_the_newest_row_stays(engine: Engine) -> None:
    """With `sequence_by`, whatever the order of the rows, and of the calls."""
    with engine.begin() as connection:
        for numbers in ([2, 5, 3], [4], [1, 2]):
            rows = [{"account": "a", "day": 1, "amount": n, "a note": str(n)} for n in numbers]
            upsert(connection, BALANCES, rows, KEY, sequence_by="amount")
            found = connection.execute(select(BALANCES.c.amount, BALANCES.c["a note"])).one()
            assert found == (5, "5")
        row = {"account": "a", "day": 1, "amount": 9, "a note": "new"}
        upsert(connection, BALANCES, row, KEY, update=["amount"], sequence_by="amount")
        assert connection.execute(select(BALANCES.c["a note"])).scalar_one() == "5"
        with pytest.raises(ConfigError, match="'amount' is None in a row; it needs a value"):
            upsert(connection, BALANCES, {**row, "amount": None}, KEY, sequence_by="amount")
        with pytest.raises(ConfigError, match="'day' is not a column that is updated"):
            upsert(connection, BALANCES, row, KEY, sequence_by="day")
