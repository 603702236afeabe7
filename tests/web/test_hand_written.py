"""Rows that people or other programs wrote into a ledger's tables: pages show them as they are."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.records import granted
from tests.turns import in_turn
from tests.web.conftest import PAGES, Reader, Trouble, as_user, text

from oncely import Busy, Key, Ledger, Message, ops
from oncely.core.activity import PERIOD_S, Activity, Run, Worker
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.testing import ManualClock
from oncely.web import dashboard

PATHS = (*PAGES, *(f"/message?id=order-{n}" for n in range(1, 6)), "/failed/export")


@pytest.fixture
def written(sqlite_ledger_url: str, clock: ManualClock) -> Iterator[tuple[Path, Reader]]:
    """The file of a ledger with something on each page, and an operator."""
    file = Path(sqlite_ledger_url.removeprefix("sqlite:///"))
    trouble = Trouble(SqlStore(sqlite_engine(file), clock=clock), clock)
    with closing(trouble.ledger):
        trouble.doubt("order-1", "order-2")
        trouble.fail(Message("order-3", b"{}", "order", {"trace": "on"}))
        trouble.wait(Message("order-4", b"{}", "order"))
        trouble.defer("order-5")
        _look_back(trouble.ledger)
        yield file, Reader(dashboard(trouble.ledger, auth=as_user()))


def _look_back(ledger: Ledger) -> None:
    """Something in each of the tables that operators look back at."""
    now = ledger.now()
    worker = Worker("w1", "consumer", "billing", "shop-1", 7, "1.0", now, now, 1)
    activity = Activity("billing", "w1", int(now) // PERIOD_S * PERIOD_S, handled=1)
    ledger.operations.keep_worker(worker, [activity])
    ledger.operations.keep_run(Run("r1", "nightly", "billing", now, now, {"handled": 1}))
    ledger.keep_retention("billing", "30d")
    ops.reset(ledger, ops.find(ledger, "order-2"), by="anna", why="the bank is back")


_JSON = {
    "processed_messages": ["result", "metadata", "fingerprint"],
    "message_steps": ["result"],
    "waiting_messages": ["headers", "body", "sent_at"],
}
_NO_JSON = ["by hand", "[1]", "{", "[" * 100_000, b"\xff\xfe", ""]


def raw_in_turn(columns: Mapping[str, Sequence[str]], raws: Sequence[Any]) -> list[Any]:
    """Each column of these tables, with one of the values in turn, or with each."""
    return [
        (table, column, raw)
        for table in columns
        for column in columns[table]
        for raw in in_turn(f"{table}.{column}", raws)
    ]


@pytest.mark.parametrize(("table", "column", "raw"), raw_in_turn(_JSON, _NO_JSON))
def test_every_page_is_shown(
    written: tuple[Path, Reader], table: str, column: str, raw: str | bytes
) -> None:
    """Whatever stands where oncely writes JSON, a body or a time, no page fails."""
    file, reader = written
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (raw,))
    for path in PATHS:
        reader.get(path)


@pytest.mark.parametrize(
    ("table", "column", "id_"),
    [
        ("processed_messages", "result", "order-1"),
        ("message_steps", "result", "order-5"),
        ("waiting_messages", "headers", "order-3"),
        ("waiting_messages", "body", "order-3"),
    ],
)
def test_what_was_written_is_shown(
    written: tuple[Path, Reader], table: str, column: str, id_: str
) -> None:
    """What is not JSON is shown as text."""
    file, reader = written
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE {table} SET {column} = 'paid by hand'")
    assert "paid by hand" in text(reader.get("/message", id=id_))


_NUMBERS = {
    "processed_messages": [
        *("attempts", "fence", "version", "duplicates", "exhausted"),
        *("first_processed_at", "last_processed_at", "lease_until"),
    ],
    "waiting_messages": [
        *("attempts", "position", "delay_s", "set_aside"),
        *("created_at", "updated_at", "due_at", "held_until"),
    ],
    "message_steps": ["created_at"],
    "message_consumers": ["retention_s"],
    "message_activity": ["began", "handled", "failed", "exhausted", "duplicates", "in_doubt"],
    "message_workers": ["pid", "started", "seen", "claims"],
    "message_runs": ["began", "ended"],
    "message_audit": ["at", "chosen", "changed", "refused"],
}


_NO_NUMBERS = ["by hand", b"\xff\xfe", "2026-11-26 01:00:00", float("inf"), -1e300]


@pytest.mark.parametrize(("table", "column", "raw"), raw_in_turn(_NUMBERS, _NO_NUMBERS))
def test_every_page_is_shown_whatever_its_numbers_are(
    written: tuple[Path, Reader], table: str, column: str, raw: str | bytes | float
) -> None:
    """SQLite lets text and bytes stand where numbers and times should: no page fails."""
    file, reader = written
    with closing(sqlite3.connect(file)) as connection, connection:
        changed = connection.execute(f"UPDATE {table} SET {column} = ?", (raw,))
        assert changed.rowcount
    for path in PATHS:
        reader.get(path)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ("attempts", "attempts 1 fence"),
        ("first_processed_at", "first seen not known"),
        ("last_processed_at", "last seen not known"),
        ("lease_until", "lease until none"),
    ],
)
def test_what_cannot_be_read_is_told(written: tuple[Path, Reader], column: str, said: str) -> None:
    """Of such a record its page says what stands in that column."""
    file, reader = written
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE processed_messages SET {column} = 'by hand'")
    page = text(reader.get("/message", id="order-1"))
    assert said in page
    assert f'"unreadable": {{"{column}": "by hand"}}' in page


def test_an_unreadable_lease_does_not_run_out(written: tuple[Path, Reader]) -> None:
    """Nobody knows whether it has: the message runs again once somebody has decided that."""
    file, _ = written
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE processed_messages SET lease_until = 'by hand'")
    key = Key("billing", "order-1")
    with closing(Ledger(SqlStore(sqlite_engine(file)))) as ledger:
        assert isinstance(ledger.claim(key), Busy)
        ledger.reset(key, by="anna")
        assert granted(ledger.claim(key)).record.lease_until is not None


@pytest.mark.parametrize("raw", ["by hand", float("inf"), -1.0])
def test_an_unreadable_retention_purges_nothing(
    written: tuple[Path, Reader], raw: str | float
) -> None:
    """Records are kept for too long rather than forgotten too early."""
    file, _ = written
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE message_consumers SET retention_s = ?", (raw,))
        connection.execute("UPDATE processed_messages SET status = 'sent', last_processed_at = 1")
    with closing(Ledger(SqlStore(sqlite_engine(file)))) as ledger:
        assert ops.purge(ledger, consumer="billing", by="anna").counts == {"billing": 0}
