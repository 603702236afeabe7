"""A row that oncely did not write so: one line names it, and all other messages go on."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.integration.drivers import connect_postgresql
from tests.records import granted
from tests.web.conftest import Reader, Trouble, as_user, text

from oncely import Consumer, Key, Ledger, Message, Policy, UnreadableRow, ops
from oncely.cli import main
from oncely.core.activity import PERIOD_S, Activity, Run, Worker
from oncely.core.waiting import WaitingMessage, retries_of
from oncely.ledger.ledger import open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.testing import ManualClock
from oncely.transports.store_transport import StoreTransport
from oncely.web import dashboard

_KEY = Key("billing", "order-1")


@pytest.fixture
def file(sqlite_ledger_url: str) -> Path:
    """The file of a ledger."""
    return Path(sqlite_ledger_url.removeprefix("sqlite:///"))


@pytest.fixture
def trouble(file: Path, clock: ManualClock) -> Iterator[Trouble]:
    """That ledger, with something in each of its tables."""
    trouble = Trouble(SqlStore(sqlite_engine(file), clock=clock), clock)
    with closing(trouble.ledger) as ledger:
        trouble.doubt("order-1")
        trouble.fail(Message("order-3", b"{}", "order"))
        trouble.wait(Message("order-4", b"{}", "order"))
        trouble.defer("order-5")
        now = ledger.now()
        worker = Worker("w1", "consumer", "billing", "shop-1", 7, "1.0", now, now, 1)
        activity = Activity("billing", "w1", int(now) // PERIOD_S * PERIOD_S, handled=1)
        ledger.operations.keep_worker(worker, [activity])
        ledger.operations.keep_run(Run("r1", "nightly", "billing", now, now, {"handled": 1}))
        ledger.keep_retention("billing", "30d")
        trouble.doubt("order-2")
        ops.reset(ledger, ops.find(ledger, "order-2"), by="anna", why="the bank is back")
        yield trouble


def write(file: Path, table: str, column: str, value: object, where: str = "true") -> None:
    """What a person writes into a table that an earlier version created."""
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        changed = connection.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value,))
        assert changed.rowcount


_READ: dict[str, tuple[Callable[[Ledger], Any], str, str]] = {
    "processed_messages": (
        lambda ledger: ledger.find(_KEY),
        "message_id = 'order-1'",
        (
            "attempts fence version duplicates exhausted first_processed_at last_processed_at"
            " lease_until metadata result"
        ),
    ),
    "message_steps": (lambda ledger: ledger.steps(Key("shop", "order-5")), "true", "result"),
    "waiting_messages": (
        lambda ledger: [ledger.mailbox.backlogs(), *ledger.dead()],
        "own_id = 'order-3'",
        "position delay_s set_aside attempts created_at updated_at due_at headers body sent_at",
    ),
    "message_consumers": (
        lambda ledger: ledger.retentions(),
        "provider = 'billing'",
        "retention_s",
    ),
    "message_activity": (
        lambda ledger: ledger.operations.activity(0.0),
        "true",
        "began handled failed exhausted duplicates in_doubt seconds",
    ),
    "message_workers": (
        lambda ledger: ledger.operations.workers(),
        "true",
        "pid started seen claims",
    ),
    "message_runs": (lambda ledger: ledger.operations.runs(9), "true", "began ended totals"),
    "message_audit": (
        lambda ledger: ledger.operations.audit(9),
        "true",
        "at chosen changed refused",
    ),
}
"""How each table is read; which of its rows is changed, and in which columns."""


@pytest.mark.parametrize("table", _READ)
def test_the_row_is_named(trouble: Trouble, file: Path, table: str) -> None:
    """Text where something else has to stand: one line has table, column, value and what to type,
    and once that is typed the row is read.
    """
    read, where, columns = _READ[table]
    for column in columns.split():
        with closing(sqlite3.connect(file)) as connection:
            [found] = connection.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()
        write(file, table, column, "by hand", where)
        with pytest.raises(UnreadableRow) as raised:
            read(trouble.ledger)
        told = str(raised.value)
        assert told.startswith(f"{table}: {column} is 'by hand', not ")
        statement, _, condition = told.partition("type in SQL: ")[2].partition(" WHERE ")
        assert statement.startswith(f"UPDATE {table} SET {column} = <")
        write(file, table, column, found, condition)
        read(trouble.ledger)


@pytest.mark.parametrize("value", [b"\xff\xfe\n" * 1_000, float("inf"), "\n" * 1_000, None])
def test_the_value_is_escaped_and_cut(trouble: Trouble, file: Path, value: object) -> None:
    """Whatever stands there, the line is one line, and names the message."""
    column = "last_processed_at" if value is not None else "metadata"
    write(file, "processed_messages", column, "{" if value is None else value)
    with pytest.raises(UnreadableRow, match="provider 'billing', message_id 'order-1'") as raised:
        trouble.ledger.find(_KEY)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("processed_messages", name) for name in ("first_processed_at", "lease_until")),
        *(("waiting_messages", name) for name in ("due_at", "held_until")),
        *(("message_consumers", "retention_s"), ("message_workers", "seen")),
    ],
)
@pytest.mark.parametrize("value", ["2026-11-26 01:00:00", b"1", float("inf")])
def test_no_such_time_is_written(
    trouble: Trouble, file: Path, table: str, column: str, value: object
) -> None:
    """SQLite, which takes any value in any column, refuses what is not a time in one of times."""
    with (
        closing(sqlite3.connect(file)) as connection,
        pytest.raises(sqlite3.IntegrityError, match=column),
    ):
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))


def test_infinite_time_on_postgresql(postgresql_ledger_url: str) -> None:
    """PostgreSQL has times without an end; a record with one is named."""
    with (
        closing(open_ledger(postgresql_ledger_url)) as ledger,
        connect_postgresql(postgresql_ledger_url) as psql,
    ):
        ledger.claim(_KEY)
        psql.execute("UPDATE processed_messages SET lease_until = 'infinity'")
        with pytest.raises(UnreadableRow, match="lease_until is inf, not a time"):
            ledger.claim(_KEY)


# ---- Pages and commands ------------------------------------------------------------------------


def test_what_an_operator_sees(
    trouble: Trouble, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page and the command that need the row say which it is; others are as before."""
    write(file, "processed_messages", "lease_until", "by hand", "message_id = 'order-1'")
    reader = Reader(dashboard(trouble.ledger, auth=as_user()))
    line = "processed_messages: lease_until is 'by hand', not a time"
    assert line in text(reader.get("/message", 500, id="order-1"))
    assert "order-2" in reader.get("/message", id="order-2")
    assert main(["show", "order-1", "--ledger", f"sqlite:///{file}"]) == 1
    assert line in capsys.readouterr().err
    assert main(["show", "order-2", "--ledger", f"sqlite:///{file}"]) == 0


# ---- Consumers ---------------------------------------------------------------------------------


@pytest.fixture
def ledger(file: Path) -> Iterator[Ledger]:
    """A ledger without a message."""
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        yield ledger


def consumer_of(ledger: Ledger, *ids: str) -> Consumer:
    """A consumer of these messages."""
    transport = StoreTransport(MemoryStore())
    transport.publish("orders", [Message(id_) for id_ in ids])
    policy = Policy(backoff="1ms")
    return Consumer(transport, "orders").idempotent(ledger, "shop", policy=policy)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_record_that_cannot_be_read_stops_no_others(
    ledger: Ledger, file: Path, *, transactional: bool
) -> None:
    """Its message becomes a dead letter that says why; all others are handled, once."""
    done: list[str] = []
    granted(ledger.claim(Key("shop", "bad")))
    write(file, "processed_messages", "fence", "by hand")
    consumer = consumer_of(ledger, "a", "bad", "b")
    if transactional:
        consumer = consumer.transactional(sqlite_engine(file))
    report = consumer.consume(lambda message, *_: done.append(message.id), drain=True)
    assert sorted(done) == ["a", "b"]
    assert (report.handled, report.dead_lettered) == (2, 1)
    [letter] = ledger.dead("shop")
    assert letter.message.id == "bad"
    assert "processed_messages: fence is 'by hand', not a whole number" in letter.reason


def keep_retries(ledger: Ledger, *ids: str) -> None:
    """These wait for a retry, and are due."""
    keys, queue = (Key("shop", id_) for id_ in ids), retries_of("shop")
    ledger.mailbox.keep(
        [
            WaitingMessage(key.message_id, "", Message(key.message_id), key, queue=queue)
            for key in keys
        ]
    )


def test_a_retry_that_cannot_be_read_stops_no_others(ledger: Ledger, file: Path) -> None:
    """It is set aside with the reason; the retries behind it run."""
    done: list[str] = []
    keep_retries(ledger, "bad", "good")
    write(file, "waiting_messages", "headers", "{", "own_id = 'bad'")
    consumer_of(ledger).consume(lambda message: done.append(message.id), drain=True)
    assert done == ["good"]
    write(file, "waiting_messages", "headers", "{}", "own_id = 'bad'")
    [letter] = ledger.dead("shop")
    assert letter.message.id == "bad"
    assert "waiting_messages: headers is '{', not a JSON object" in letter.reason


def test_due_times_that_cannot_be_read_stop_nobody(ledger: Ledger, file: Path) -> None:
    """While nobody knows when the retries are due, deliveries go on."""
    done: list[str] = []
    keep_retries(ledger, "bad")
    write(file, "waiting_messages", "held_until", "by hand")
    consumer = consumer_of(ledger, "a")

    def handle(message: Message) -> None:
        done.append(message.id)
        consumer.stop()

    consumer.consume(handle)
    assert done == ["a"]
