"""The schema on real databases: made, shown as SQL, named as the user likes, and looked after."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from psycopg import sql
from sqlalchemy import Engine, create_engine, inspect, make_url
from tests.conformance.conftest import url_of
from tests.integration.drivers import (
    Psycopg,
    PyMysql,
    connect_mysql,
    connect_postgresql,
    rows_of,
)
from tests.records import deferred, granted

from oncely.core.errors import ConfigError, StoreError
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.open_store import open_store
from oncely.stores.sql import SqlStore
from oncely.stores.sql.migrating import _config
from oncely.testing import at_once

_KINDS = ("sqlite", "postgresql", "mysql")
_LONG = "a" * 63
_DROP_INDEX = {
    "sqlite": "DROP INDEX waiting_messages_free;",
    "postgresql": "DROP INDEX waiting_messages_free;",
    "mysql": "DROP INDEX waiting_messages_free ON waiting_messages;",
}


@pytest.fixture(params=_KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind that has a schema."""
    return url_of(request.param, request, tmp_path)


@contextmanager
def opened(url: str | Engine, **names: Any) -> Iterator[Ledger]:
    """A ledger, for as long as the block."""
    with closing(open_ledger(url, **names)) as ledger:
        yield ledger


def check_usable(ledger: Ledger, key: Key) -> None:
    """The schema is in order, and the ledger does its work with it."""
    assert ledger.problems() == []
    assert ledger.migration_sql() == ""
    claim = granted(ledger.claim(key))
    ledger.keep_step(claim, "step", 1)
    ledger.handled(claim, None, [deferred("m", parent=key)])
    ledger.mailbox.sent(ledger.mailbox.take(1, "60s"))
    assert ledger.counts() == {(key.consumer, State.COMPLETED): 1}
    assert ledger.steps(key) == {"step": 1}
    assert ledger.size()


# ---- Migrating ---------------------------------------------------------------------------------


def test_sql_by_hand(url: str, key: Key) -> None:
    """The SQL shown makes, run by hand, the schema that migrate makes; to show it makes nothing."""
    with opened(url, table="by_hand") as ledger, opened(url, table="migrated") as other:
        shown = ledger.migration_sql()
        assert _tables(url) == []
        _run(url, shown)
        other.migrate()
        for ending in ("", "_waiting", "_steps"):
            assert _shape(url, f"by_hand{ending}") == _shape(url, f"migrated{ending}")
        check_usable(ledger, key)


def test_older_schema(url: str, key: Key) -> None:
    """An older schema gets what is new, also from ten at once, and keeps its rows."""
    with opened(url) as ledger, opened(url, table="other") as other:
        _make_older(url)
        other.migrate()
        ledger.complete(granted(ledger.claim(key)), {"total": 3})
        record = ledger.find(key)
        assert ledger.problems() == [
            "processed_messages is at migration 0001 of 0008; type: oncely migrate"
        ]
        with pytest.raises(StoreError, match=r"of an older version; call migrate\(\)"):
            ledger.steps(key)
        assert "fence" not in ledger.migration_sql()  # That is a column of the first table.
        at_once(10, lambda _: ledger.migrate())
        assert ledger.find(key) == record
        assert _shape(url, "waiting_messages") == _shape(url, "other_waiting")
        assert _shape(url, "message_steps") == _shape(url, "other_steps")
        assert _shape(url, "message_consumers") == _shape(url, "other_consumers")
        ledger.forget(key)
        check_usable(ledger, key)


def test_schema_without_workers_of_claims(url: str, key: Key) -> None:
    """A schema of the time before that gets the columns; the SQL that is shown has each once."""
    with opened(url) as ledger:
        ledger.migrate()
        _run(url, "ALTER TABLE processed_messages DROP COLUMN worker;\n")
        _run(url, "ALTER TABLE message_workers DROP COLUMN number;\n")
        _run(url, "UPDATE processed_messages_version SET version_num = '0007';\n")
        assert ledger.migration_sql().count("ADD COLUMN") == 2
        at_once(3, lambda _: ledger.migrate())
        assert ledger.problems() == []
        check_usable(ledger, key)


def test_migration_that_was_cut_off(url: str, key: Key) -> None:
    """Where the tables are there already, or one of them, migrate makes what is missing."""
    with opened(url) as ledger:
        ledger.migrate()
        _run(url, "DROP TABLE message_steps;\n")
        _run(url, _DROP_INDEX[url.partition(":")[0].partition("+")[0]])
        _run(url, "UPDATE processed_messages_version SET version_num = '0001';")
        ledger.migrate()
        check_usable(ledger, key)


def test_newer_schema(url: str, key: Key) -> None:
    """A schema that a newer version made is left alone, and what to do is said."""
    with opened(url) as ledger:
        ledger.migrate()
        _run(url, "UPDATE processed_messages_version SET version_num = '9999';")
        text = "processed_messages is at migration 9999 of a newer oncely; install"
        for call in (ledger.migrate, ledger.migration_sql):
            with pytest.raises(StoreError, match=text):
                call()
        assert [problem.startswith(text) for problem in ledger.problems()] == [True]
        granted(ledger.claim(key))


def test_foreign_table(url: str) -> None:
    """A table of that name which is something else is left as it is."""
    _run(url, "CREATE TABLE processed_messages (id INT, status VARCHAR(9), note VARCHAR(9));")
    before = _shape(url, "processed_messages")
    with opened(url) as ledger:
        for call in (ledger.migrate, ledger.migration_sql):
            with pytest.raises(
                StoreError, match=r"is a table of another program, without attempts, first_pro"
            ):
                call()
    assert _shape(url, "processed_messages") == before
    assert _tables(url) == ["processed_messages"]


def test_missing_table(url: str, key: Key) -> None:
    """Without its table every call says to migrate."""
    with opened(url) as ledger:
        for call in (lambda: ledger.claim(key), ledger.counts, ledger.purge):
            with pytest.raises(StoreError, match=r"processed_messages is missing.*migrate\(\)"):
                call()
        expected = ["there is no table processed_messages; type: oncely migrate"]
        assert ledger.problems() == expected


# ---- Names -------------------------------------------------------------------------------------


def test_table_names(url: str, key: Key) -> None:
    """Any identifier of up to 63 bytes names a table, also one that SQL means something by; tables
    in one database share nothing, however alike their names.
    """
    for table in ("Order", "select", "_1", "a" * 52, _LONG, _LONG[:-1] + "b"):
        with opened(url, table=table) as ledger:
            ledger.migrate()
            check_usable(ledger, key)
            assert table in _tables(url)


def test_postgresql_schema(postgresql_url: str, key: Key) -> None:
    """A schema is created with its table; the table of the same name beside it is another."""
    for schema in ("Mine", "select", None):
        with opened(postgresql_url, schema=schema) as ledger:
            ledger.migrate()
            check_usable(ledger, key)


def test_mysql_schema(mysql_url: str, mysql: PyMysql, key: Key) -> None:
    """On MariaDB a schema is another database; one that is not there is named."""
    other = f"{make_url(mysql_url).database}_other"
    with opened(mysql_url, schema=other) as ledger:
        with pytest.raises(StoreError, match=f"Unknown database '{other}'"):
            ledger.migrate()
        rows_of(mysql, f"CREATE DATABASE {other}")
        try:
            ledger.migrate()
            check_usable(ledger, key)
            assert _tables(mysql_url) == []
        finally:
            rows_of(mysql, f"DROP DATABASE {other}")


WRONG_NAMES = (
    "",
    " ",
    "a b",
    'a"b',
    "a`b",
    "a'b",
    "a.b",
    "1a",
    "a-b",
    "é",
    "a\n",
    "a\0",
    _LONG + "a",
)


@pytest.mark.parametrize("name", [*WRONG_NAMES, 5, b"bytes"])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        *((kind, "table") for kind in ("postgresql", "mysql", "sqlite", "memory", "redis")),
        *((kind, "schema") for kind in ("postgresql", "mysql")),
    ],
)
def test_wrong_names(kind: str, what: str, name: Any, tmp_path: Path) -> None:
    """A name that is no identifier, or too long, is refused in one line."""
    with pytest.raises(ConfigError, match=rf"^{what}: .*$") as raised:
        open_ledger(_anywhere(kind, tmp_path), **{what: name})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["sqlite", "memory", "redis"])
def test_no_schemas(kind: str, tmp_path: Path) -> None:
    """Where there are no schemas, to name one is an error, and not ignored."""
    with pytest.raises(ConfigError, match="only PostgreSQL, MariaDB and MySQL have schemas"):
        open_ledger(_anywhere(kind, tmp_path), schema="mine")


def _anywhere(kind: str, folder: Path) -> str:
    """The URL of a store that is not connected to."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'ledger.db'}"
    return f"{kind}://127.0.0.1:1/0"


# ---- What has become of the schema -------------------------------------------------------------

_T = "ALTER TABLE processed_messages"
_POSTGRESQL_DRIFTS = {
    f"{_T} DROP COLUMN fence": "the column fence is missing",
    f"{_T} ALTER version TYPE int": "version is of type INTEGER",
    f"{_T} ALTER provider TYPE varchar(50)": "provider is of type VARCHAR(length=50",
    f"{_T} ALTER lease_until TYPE timestamp": "lease_until is of type TIMESTAMP",
    f"{_T} DROP CONSTRAINT uq_message_provider": "unique",
    f"{_T} ALTER fence DROP NOT NULL": "fence should not be nullable",
}
_MYSQL_DRIFTS = {
    f"{_T} DROP COLUMN fence": "the column fence is missing",
    f"{_T} MODIFY version int NOT NULL": "version is of type INTEGER",
    f"{_T} MODIFY lease_until TIMESTAMP NULL": "lease_until is of type TIMESTAMP",
    f"{_T} MODIFY fence bigint": "fence should not be nullable",
    f"{_T} DROP CONSTRAINT uq_message_provider": "unique",
    f"{_T} MODIFY message_id varchar(255) COLLATE utf8mb4_general_ci NOT NULL": "different ids",
    f"{_T} MODIFY provider varchar(255) COLLATE utf8mb4_bin NOT NULL": "provider has the collation",
}
_SQLITE_DRIFTS = {f"{_T} DROP COLUMN fence": "the column fence is missing"}
_D = "ALTER TABLE waiting_messages"
_POSTGRESQL_DRIFTS |= {
    f"{_D} DROP CONSTRAINT waiting_messages_name": "there is no unique constraint on",
    f"{_D} ALTER ordering_key TYPE varchar(9)": "ordering_key is of type VARCHAR(length=9",
    "DROP INDEX waiting_messages_free": "the index waiting_messages_free is missing",
}
_MYSQL_DRIFTS |= {
    f"{_D} DROP CONSTRAINT waiting_messages_name": "there is no unique constraint on",
    f"{_D} MODIFY body BLOB NOT NULL": "body is of type BLOB",
    "DROP INDEX waiting_messages_lanes ON waiting_messages": "waiting_messages_lanes is missing",
    "ALTER TABLE message_steps MODIFY name varchar(255) COLLATE utf8mb4_bin NOT NULL": "name has",
}
_ALL_DRIFTS = {
    f"{_D} DROP COLUMN source": "the column source is missing",
    "DROP TABLE message_steps": "processed_messages: its table message_steps is missing",
    "DELETE FROM processed_messages_version": "is at migration none of 0008; type: oncely migrate",
    "DROP TABLE processed_messages": "there is no table processed_messages; type: oncely migrate",
}
DRIFTS = [
    (kind, statement, told)
    for kind, drifts in zip(
        _KINDS, (_SQLITE_DRIFTS, _POSTGRESQL_DRIFTS, _MYSQL_DRIFTS), strict=True
    )
    for statement, told in {**_ALL_DRIFTS, **drifts}.items()
]


@pytest.mark.in_turn("drifts")
@pytest.mark.parametrize(("kind", "statement", "told"), DRIFTS)
def test_drift_is_told(
    kind: str, statement: str, told: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What somebody has changed about the table is told in one sentence, and where."""
    url = url_of(kind, request, tmp_path)
    with opened(url) as ledger:
        ledger.migrate()
        assert ledger.problems() == []
        _run(url, f"{statement};")
        [problem] = ledger.problems()
        assert told in problem
        assert "_messages" in problem or "message_steps" in problem


def test_what_is_added_is_its_owners(url: str, key: Key) -> None:
    """A column, an index and a table that somebody has added are nobody's problem."""
    with opened(url) as ledger:
        ledger.migrate()
        _run(url, f"{_T} ADD COLUMN note VARCHAR(10);")
        _run(url, "CREATE INDEX by_status ON processed_messages (status);")
        _run(url, "CREATE TABLE notes (id INT);")
        check_usable(ledger, key)


# ---- Rights ------------------------------------------------------------------------------------


@pytest.fixture
def weak_url(postgresql_url: str, psql: Psycopg) -> Iterator[str]:
    """The URL of a role that may connect, and no more."""
    role = f"{psql.info.dbname}_weak"
    psql.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    weak_url = make_url(postgresql_url).set(username=role)
    yield weak_url.render_as_string(hide_password=False)
    for statement in ("DROP OWNED BY {}", "DROP ROLE {}"):
        psql.execute(sql.SQL(statement).format(sql.Identifier(role)))


def test_schema_of_ones_own(weak_url: str, psql: Psycopg, key: Key) -> None:
    """A role that may use a schema, and create none, needs no more."""
    role = sql.Identifier(str(make_url(weak_url).username))
    with opened(weak_url, schema="mine") as ledger:
        with pytest.raises(StoreError, match="permission"):
            ledger.migrate()
        psql.execute(sql.SQL("CREATE SCHEMA mine AUTHORIZATION {}").format(role))
        ledger.migrate()
        check_usable(ledger, key)


def _make_older(url: str) -> None:
    """The schema as the first migration leaves it."""
    store = open_store(url)
    assert isinstance(store, SqlStore)
    with (
        store._engine.connect() as connection,
        store._dialect.migrating(connection),
        _config(connection, store._name) as config,
    ):
        command.upgrade(config, "0001")
    store.close()


# ---- What stands in a database -----------------------------------------------------------------


@contextmanager
def _inspected(url: str) -> Iterator[Any]:
    engine = create_engine(open_store(url)._engine.url)  # type: ignore[attr-defined]
    try:
        yield inspect(engine)
    finally:
        engine.dispose()


def _tables(url: str) -> list[str]:
    with _inspected(url) as inspector:
        return sorted(inspector.get_table_names())


def _shape(url: str, table: str) -> list[object]:
    """All that makes a table, but for the names of its constraints."""
    with _inspected(url) as inspector:
        columns = [
            {**column, "type": repr(column["type"])} for column in inspector.get_columns(table)
        ]
        keys = [key["column_names"] for key in inspector.get_unique_constraints(table)]
        indexes = [index["column_names"] for index in inspector.get_indexes(table)]
        primary = inspector.get_pk_constraint(table)["constrained_columns"]
        return [columns, sorted(keys), sorted(indexes), primary]


def _run(url: str, script: str) -> None:
    """Run a script by hand, with the driver alone."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            file.executescript(script)
    elif url.startswith("postgresql"):
        with closing(connect_postgresql(url)) as postgresql:
            postgresql.execute(script.encode())
    else:
        with closing(connect_mysql(url)) as mysql:
            for statement in script.split(";\n"):
                if statement.strip():
                    rows_of(mysql, statement)


def test_the_newest_migration_is_known_without_alembic(url: str) -> None:
    """Who finds it there imports nothing to run migrations with; who finds less migrates."""
    with opened(url) as ledger:
        ledger.migrate()
    program = (
        "import sys\nfrom oncely.ledger.ledger import open_ledger\n"
        f"ledger = open_ledger({url!r})\nledger.migrate()\n"
        "assert 'alembic' not in sys.modules\nledger.close()\n"
    )
    asked = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 0, asked.stderr
