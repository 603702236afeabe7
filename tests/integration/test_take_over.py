"""A table that was made by hand, with rows in it, is taken over by migrate."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.drivers import (
    Psycopg,
    PyMysql,
    connect_postgresql,
    rows_of,
)
from tests.integration.handwritten import TABLE, Service
from tests.integration.test_schema import _run as run_by_hand
from tests.records import granted, record_of

from oncely.core.commands import Busy, Duplicate
from oncely.core.errors import StoreError
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

_CONSUMER = "sms-service"
_SENT, _FAILED, _BEGUN = (Key(_CONSUMER, name) for name in ("sent", "failed", "begun"))
_DAY_S = 86_400
_MAX_INT = 2**31 - 1

_MYSQL_TABLE = """
CREATE TABLE processed_messages (
    id INT AUTO_INCREMENT PRIMARY KEY,
    message_id VARCHAR(255) NOT NULL,
    provider VARCHAR(50) NOT NULL,
    status VARCHAR(50) NOT NULL DEFAULT 'processing',
    attempts INT DEFAULT 1,
    first_processed_at TIMESTAMP NOT NULL {first},
    last_processed_at TIMESTAMP NOT NULL {last},
    metadata JSON,
    CONSTRAINT uq_message_provider UNIQUE (message_id, provider),
    INDEX idx_processed_messages_cleanup (last_processed_at)
) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci
"""
_NOW = "DEFAULT CURRENT_TIMESTAMP"
_RENEWED = f"{_NOW} ON UPDATE CURRENT_TIMESTAMP"

_SQLITE_TABLE = """
CREATE TABLE processed_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    message_id TEXT NOT NULL,
    provider TEXT NOT NULL,
    status TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    first_processed_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP,
    last_processed_at DATETIME NOT NULL DEFAULT CURRENT_TIMESTAMP,
    metadata TEXT,
    UNIQUE(message_id, provider)
)
"""


by_hand_too = pytest.mark.parametrize("by_hand", [False, True], ids=["migrated", "by hand"])


def migrate(ledger: Ledger, url: str, *, by_hand: bool) -> None:
    """By the ledger, or with the SQL that an operator is shown: that does the same."""
    if by_hand:
        run_by_hand(url, ledger.migration_sql())
    else:
        ledger.migrate()


def check_taken_over(ledger: Ledger) -> None:
    """The table is in order, and its three old rows are what they were, for the ledger."""
    assert ledger.problems() == []
    assert ledger.migration_sql() == ""
    before = {key: record_of(ledger, key) for key in (_SENT, _FAILED, _BEGUN)}
    for record in before.values():
        assert record.first_seen == pytest.approx(ledger.now() - 2 * _DAY_S, abs=60)
        assert record.last_seen == pytest.approx(ledger.now(), abs=60)
    assert isinstance(ledger.claim(_SENT), Duplicate)
    assert isinstance(ledger.claim(_BEGUN), Busy)
    assert before[_FAILED].error == "no credit"
    assert isinstance(ledger.claim(_FAILED, policy=Policy(on_failed="skip")), Duplicate)
    claim = granted(ledger.claim(_FAILED))
    assert (claim.fence, claim.attempts) == (2, 4)
    ledger.complete(ledger.extend(claim, "60s"), {"sent": True})
    after = record_of(ledger, _FAILED)
    assert (after.state, after.result) == (State.COMPLETED, {"sent": True})
    assert after.first_seen == before[_FAILED].first_seen


def check_new_messages(ledger: Ledger) -> None:
    """Messages that the table has not seen go their way in it, also with long names."""
    keys = [Key(name, "🧾" * 255) for name in (_CONSUMER, "x" * 255)]
    claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
    ledger.extend_many(claims, "60s")
    ledger.complete_many(claims)
    assert all(isinstance(outcome, Duplicate) for outcome in ledger.claim_many(keys))


# ---- PostgreSQL --------------------------------------------------------------------------------


@pytest.fixture(params=["UTC", "Asia/Kathmandu", "America/St_Johns"])
def handmade(request: pytest.FixtureRequest, psql: Psycopg, postgresql_url: str) -> str:
    """The URL of a database with the service's table, rows in it, in one time zone or another."""
    psql.execute(f"ALTER DATABASE {psql.info.dbname} SET timezone = '{request.param}'")
    with closing(connect_postgresql(postgresql_url)) as connection:
        connection.execute(TABLE)
        service = Service(connection, _CONSUMER)
        for key in (_SENT, _FAILED, _BEGUN):
            service.mark_processing(key.message_id, {"to": "+49"})
        service.mark_sent(_SENT.message_id)
        service.mark_failed(_FAILED.message_id, "no credit")
        connection.execute(
            "UPDATE processed_messages SET first_processed_at = NOW() - INTERVAL '2 days',"
            " attempts = CASE status WHEN 'failed' THEN 3 ELSE 1 END"
        )
    return postgresql_url


@by_hand_too
def test_postgresql_table(handmade: str, *, by_hand: bool) -> None:
    """The service's table becomes the ledger's: rows stay, times come out right in any zone."""
    with closing(open_ledger(handmade)) as ledger:
        with pytest.raises(StoreError, match=r"migrate\(\)"):
            ledger.claim(_SENT)
        assert ledger.problems() == [
            "processed_messages is at migration none of 0008; type: oncely migrate"
        ]
        migrate(ledger, handmade, by_hand=by_hand)
        check_taken_over(ledger)
        check_new_messages(ledger)


def test_postgresql_service_goes_on(handmade: str) -> None:
    """The service works on as before on the table that was taken over, beside the ledger."""
    with (
        closing(open_ledger(handmade)) as ledger,
        closing(connect_postgresql(handmade)) as connection,
    ):
        ledger.migrate()
        service = Service(connection, _CONSUMER)
        assert service.claims("new")
        record = record_of(ledger, Key(_CONSUMER, "new"))
        assert record.last_seen == pytest.approx(ledger.now(), abs=5)
        service.mark_sent("new")
        assert isinstance(ledger.claim(Key(_CONSUMER, "new")), Duplicate)
        ledger.claim(Key(_CONSUMER, "newer"))
        assert not service.claims("newer")
        indexes = connection.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'public'")
        names = {name for (name,) in indexes}
        assert {"idx_processed_messages_lookup", "idx_processed_messages_cleanup"} < names
        connection.execute(
            "UPDATE processed_messages SET last_processed_at = NOW() - '31 d'::interval"
        )
        assert service.cleanup() == 5


def test_postgresql_ids_go_on(handmade: str) -> None:
    """The numbers of rows go on beyond 32 bits: a message seen again uses one up as well."""
    with (
        closing(open_ledger(handmade)) as ledger,
        closing(connect_postgresql(handmade)) as connection,
    ):
        ledger.migrate()
        connection.execute("SELECT setval('processed_messages_id_seq', %s)", (_MAX_INT,))
        granted(ledger.claim(Key(_CONSUMER, "new")))
        ids = connection.execute("SELECT max(id), count(id) FROM processed_messages").fetchone()
        assert ids == (_MAX_INT + 1, 4)


@pytest.mark.parametrize("id_", ["SERIAL", "INT GENERATED ALWAYS AS IDENTITY"])
def test_postgresql_table_in_a_schema(postgresql_url: str, psql: Psycopg, id_: str) -> None:
    """A table in a schema of its own is taken over there, however its rows are numbered."""
    psql.execute("CREATE SCHEMA mine")
    psql.execute("SET search_path = mine")
    psql.execute(TABLE.replace("SERIAL", id_).encode())
    with closing(open_ledger(postgresql_url, schema="mine")) as ledger:
        ledger.migrate()
        assert ledger.problems() == []
        check_new_messages(ledger)
        assert psql.execute("SELECT count(*) FROM processed_messages").fetchone() == (2,)


# ---- MariaDB -----------------------------------------------------------------------------------


@by_hand_too
@pytest.mark.parametrize(
    ("first", "last"),
    [("", ""), (_NOW, _NOW), (_NOW, _RENEWED), (_RENEWED, "DEFAULT '2000-01-01 00:00:00'")],
    ids=["without defaults", "now", "renewed", "as old servers had it"],
)
def test_mysql_table(
    mysql_url: str, mysql: PyMysql, first: str, last: str, *, by_hand: bool
) -> None:
    """A table with TIMESTAMPs becomes the ledger's, whatever zone it was written from."""
    _fill_mysql(mysql, _MYSQL_TABLE.format(first=first, last=last))
    with closing(open_ledger(mysql_url)) as ledger:
        migrate(ledger, mysql_url, by_hand=by_hand)
        check_taken_over(ledger)
        check_new_messages(ledger)


def test_mysql_ids_become_distinct(mysql_url: str, mysql: PyMysql) -> None:
    """Ids that the table took for one are two messages once the ledger has it."""
    _fill_mysql(mysql, _MYSQL_TABLE.format(first=_NOW, last=_NOW))
    with closing(open_ledger(mysql_url)) as ledger:
        ledger.migrate()
        for name in ("SENT", "sent ", "Sent"):
            granted(ledger.claim(Key(_CONSUMER, name)))
        granted(ledger.claim(Key("SMS-Service", "sent")))


def test_mysql_last_seen_is_renewed_for_the_service(mysql_url: str, mysql: PyMysql) -> None:
    """A service whose table tells by itself when a row was changed last still has that."""
    _fill_mysql(mysql, _MYSQL_TABLE.format(first=_RENEWED, last=_RENEWED))
    with closing(open_ledger(mysql_url)) as ledger:
        ledger.migrate()
        before = record_of(ledger, _BEGUN)
        rows_of(mysql, "SET time_zone = '+00:00'")
        rows_of(mysql, "UPDATE processed_messages SET status = 'sent' WHERE message_id = 'begun'")
        after = record_of(ledger, _BEGUN)
        assert after.last_seen > before.last_seen
        assert after.first_seen == before.first_seen


def _fill_mysql(connection: PyMysql, table: str) -> None:
    rows_of(connection, "SET time_zone = '+05:45'")
    rows_of(connection, table)
    for key, status in ((_SENT, "sent"), (_FAILED, "failed"), (_BEGUN, "processing")):
        metadata = '{"error": "no credit"}' if status == "failed" else None
        rows_of(
            connection,
            "INSERT INTO processed_messages (message_id, provider, status, attempts, metadata,"
            " first_processed_at, last_processed_at)"
            " VALUES (%s, %s, %s, %s, %s, NOW() - INTERVAL 2 DAY, NOW())",
            *(key.message_id, key.consumer, status, 3 if status == "failed" else 1, metadata),
        )


# ---- SQLite ------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a table made by hand, with rows in it."""
    path = tmp_path / "service.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(_SQLITE_TABLE)
        for key, status in ((_SENT, "sent"), (_FAILED, "failed"), (_BEGUN, "processing")):
            metadata = '{"error": "no credit"}' if status == "failed" else None
            connection.execute(
                "INSERT INTO processed_messages (message_id, provider, status, attempts, metadata,"
                " first_processed_at) VALUES (?, ?, ?, ?, ?, datetime('now', '-2 days'))",
                (*reversed(key), status, 3 if status == "failed" else 1, metadata),
            )
    return path


@by_hand_too
def test_sqlite_table(file: Path, *, by_hand: bool) -> None:
    """A table in a file becomes the ledger's."""
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        migrate(ledger, f"sqlite:///{file}", by_hand=by_hand)
        check_taken_over(ledger)
        check_new_messages(ledger)
