"""Locks that another program holds for as long as it likes, of each kind, against each call: a call
gets its answer while the lock is held.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from tests.conditions import LIMIT_S, wait_until
from tests.integration.callers import Place, opened
from tests.integration.drivers import engine_on
from tests.records import deferred, granted

from oncely._util import sqlite_files
from oncely.core.commands import Busy, Granted
from oncely.core.errors import ContentionError, StoreUnavailable
from oncely.core.message import Message
from oncely.core.record import Claim, Key
from oncely.core.waiting import OUTBOX, queue_named, retries_of, retry_name
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.sql import SqlStore, postgresql, sql_store

_TABLES = ("processed_messages", "waiting_messages", "message_steps", "message_consumers")
_OLDER = "UPDATE processed_messages_version SET version_num = '0001'"
_BATCH = 200
Locks = dict[str, tuple[str, ...]]

_POSTGRESQL: Locks = {
    mode: (f"LOCK TABLE {', '.join(_TABLES)} IN {mode} MODE",)
    for mode in ("ACCESS EXCLUSIVE", "SHARE", "SHARE UPDATE EXCLUSIVE")
}
_POSTGRESQL |= {
    "rows": tuple(f"SELECT 1 FROM {table} FOR UPDATE" for table in _TABLES[:2]),
    "migration": (
        "SELECT pg_advisory_xact_lock(hashtext('oncely'), hashtext('\"processed_messages\"'))",
    ),
}
_MYSQL: Locks = {
    kind: (f"LOCK TABLES {', '.join(f'{table} {kind}' for table in _TABLES)}",)
    for kind in ("WRITE", "READ")
}
_MYSQL |= {
    "rows": _POSTGRESQL["rows"],
    "migration": ("SELECT GET_LOCK('oncely `processed_messages`', 0)",),
}
_ALTER = "ALTER TABLE processed_messages ADD COLUMN note INT"
_LOCKS: dict[str, Locks] = {
    "postgresql": _POSTGRESQL,
    "pooled": {"ACCESS EXCLUSIVE": _POSTGRESQL["ACCESS EXCLUSIVE"]},
    "mysql": _MYSQL,
    "sqlite": {"file": ("BEGIN IMMEDIATE",)},
}


@pytest.fixture
def place(kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one database of that kind."""
    with opened(kind, request) as place:
        yield place


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are shorter than they usually are."""
    monkeypatch.setattr(postgresql, "_LOCK_WAIT_MS", 300)
    monkeypatch.setattr(postgresql, "_MIGRATION_WAIT_MS", 100)
    monkeypatch.setattr(sql_store, "_MIGRATION_PATIENCE_S", 0.0)
    monkeypatch.setattr(sql_store, "_MIGRATION_PAUSE_S", 0.05)
    monkeypatch.setattr(sqlite_files, "BUSY_TIMEOUT_S", 0.2)


def calls_on(ledger: Ledger) -> dict[str, Callable[[], Any]]:
    """Each call, prepared for a ledger without a row."""
    own, extended, handled, stepping = (_claim(ledger, f"own {n}") for n in range(4))
    failed, dead = (_claim(ledger, name) for name in ("failed", "dead"))
    ledger.fail(failed, "no")
    ledger.fail(dead, "no", final=True)
    queue = retries_of("billing")
    letter = deferred("dead", parent=dead.key)
    ledger.mailbox.keep(
        [replace(letter, queue=queue, name=retry_name(queue), reason="no", is_set_aside=True)]
    )
    [number] = [each.id for each in ledger.dead()]
    store = ledger._store
    assert isinstance(store, SqlStore)
    store.put("orders", [Message("1", b"{}")])
    batch = [failed.key, *(Key("billing", str(n)) for n in range(_BATCH))]
    return {
        "claim": lambda: [ledger.claim(failed.key)],
        "batch": lambda: ledger.claim_many(batch),
        "timed batch": lambda: ledger.claim_many(batch, sent_at=[1.0] * len(batch)),
        "complete": lambda: ledger.complete(own),
        "extend": lambda: ledger.extend(extended, "5m"),
        "send": lambda: ledger.handled(handled, None, [deferred("m", parent=handled.key)]),
        "step": lambda: ledger.keep_step(stepping, "debit", 1),
        "purge": lambda: ledger.purge("0s"),
        "take": lambda: ledger.mailbox.take(10, "60s"),
        "take from a queue": lambda: store.transaction(
            lambda transaction: transaction.take(queue_named("orders"), 10, 60.0)
        ),
        "put": lambda: store.put("orders", [Message("2", b"{}")]),
        "retry": lambda: ledger.mailbox.retry_dead([number], None, "anna", "why"),
        "counts": ledger.counts,
        "backlogs": lambda: ledger.mailbox.backlog(OUTBOX),
        "find": lambda: ledger.find(own.key),
        "size": ledger.size,
        "migrate": ledger.migrate,
    }


def _claim(ledger: Ledger, message_id: str) -> Claim:
    return granted(ledger.claim(Key("billing", message_id)))


@pytest.mark.in_turn("locks")
@pytest.mark.parametrize(
    ("kind", "lock"), [(kind, lock) for kind, locks in _LOCKS.items() for lock in locks]
)
def test_each_lock_against_each_call(
    place: Place, kind: str, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is held, each call is done, or says that another transaction holds what it needs; a
    claim is granted, or busy. Afterwards each works.
    """
    with closing(open_ledger(place.url)) as ledger:
        calls = calls_on(ledger)
        with place.engine.begin() as program:
            program.execute(text(_OLDER))
        with ThreadPoolExecutor(len(calls)) as threads, closing(place.engine.connect()) as program:
            for statement in _LOCKS[kind][lock]:
                program.execute(text(statement))
            ends = _ended(threads, calls)
            program.invalidate()
        _check(ends, ContentionError, StoreUnavailable)
        if kind != "sqlite":
            _check_claims(ends)
        monkeypatch.setattr(sql_store, "_MIGRATION_PATIENCE_S", LIMIT_S)
        ledger.migrate()
        assert ledger.problems() == []
        granted(ledger.claim(Key("billing", "later")))


def _ended(
    threads: ThreadPoolExecutor, calls: Mapping[str, Callable[[], Any]]
) -> dict[str, "Future[Any]"]:
    """The calls, all at once, when the last of them has ended."""
    ends = {name: threads.submit(call) for name, call in calls.items()}
    wait_until(
        lambda: all(end.done() for end in ends.values()),
        lambda: [name for name, end in ends.items() if not end.done()],
        limit_s=60.0,
    )
    return ends


def _check(ends: Mapping[str, "Future[Any]"], *told: type[Exception]) -> None:
    errors = {name: error for name, end in ends.items() if (error := end.exception())}
    assert {name: each for name, each in errors.items() if not isinstance(each, told)} == {}


def _check_claims(ends: Mapping[str, "Future[Any]"]) -> None:
    for name in ("claim", "batch", "timed batch"):
        assert {type(each) for each in ends[name].result()} <= {Granted, Busy}


@pytest.mark.in_turn("locks")
@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_behind_a_waiting_change_of_the_table(place: Place) -> None:
    """The same while another program's ALTER TABLE waits for a long transaction."""
    with closing(open_ledger(place.url)) as ledger, ExitStack() as held:
        calls = calls_on(ledger)
        del calls["migrate"]
        threads = held.enter_context(ThreadPoolExecutor(len(calls) + 1))
        long = held.enter_context(closing(place.engine.connect()))
        long.execute(text("SELECT count(*) FROM processed_messages"))
        change = threads.submit(_alter, place.engine)
        wait_until(lambda: _is_waiting(place))
        ends = _ended(threads, calls)
        assert not change.done()
        long.rollback()
        change.result(LIMIT_S)
        _check(ends, ContentionError)
        _check_claims(ends)


def _alter(engine: Engine) -> None:
    with engine.begin() as program:
        program.execute(text(_ALTER))
    with engine.begin() as program:
        program.execute(text("ALTER TABLE processed_messages DROP COLUMN note"))


_WAITING = {
    "postgresql": "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
    " AND query LIKE 'ALTER%' AND wait_event_type = 'Lock'",
    "mysql": "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE()"
    " AND info LIKE 'ALTER%' AND state LIKE 'Waiting for table metadata%'",
}


def _is_waiting(place: Place) -> bool:
    with place.engine.connect() as program:
        return bool(program.execute(text(_WAITING[place.kind])).all())


# ---- Migrations --------------------------------------------------------------------------------


@contextmanager
def _long_transaction(engine: Engine) -> Iterator[Connection]:
    """Another program's, which has written to the table of records."""
    with closing(engine.connect()) as program:
        program.execute(
            text("UPDATE processed_messages SET attempts = attempts WHERE message_id = 'old'")
        )
        yield program


@pytest.mark.parametrize("kind", ["postgresql"])
@pytest.mark.parametrize("is_indexed", [False, True], ids=["no index", "index"])
def test_migration_beside_a_long_transaction(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_indexed: bool
) -> None:
    """A migration of a table that a transaction writes to waits for that, and nobody waits for the
    migration: claims are granted at once, and the index is built beside writers.
    """
    monkeypatch.setattr(sql_store, "_MIGRATION_PATIENCE_S", LIMIT_S)
    _claim(place.ledger, "old")
    with place.engine.begin() as program:
        program.execute(text(_OLDER))
        if not is_indexed:
            program.execute(text("DROP INDEX processed_messages_unfinished"))
    with ThreadPoolExecutor(1) as threads, _long_transaction(place.engine):
        migration = threads.submit(place.ledger.migrate)
        done = threading.Event()
        migration.add_done_callback(lambda _: done.set())
        wait_until(lambda: _migrates(place))
        for number in range(300):
            _claim(place.ledger, str(number))
        assert not done.is_set()
    migration.result(LIMIT_S)
    assert place.ledger.problems() == []


def _migrates(place: Place) -> bool:
    """Whether a migration waits for locks."""
    asked = (
        "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
        " AND query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'"
    )
    with place.engine.connect() as program:
        return bool(program.execute(text(asked)).all())


@pytest.mark.parametrize("kind", ["postgresql"])
def test_index_that_was_broken_off(place: Place) -> None:
    """What is left of an index whose building was broken off is replaced."""
    place.ledger.claim(Key("billing", "1"))
    with place.engine.begin() as program:
        program.execute(text(_OLDER))
        program.execute(
            text(
                "UPDATE pg_index SET indisvalid = false"
                " WHERE indexrelid = 'processed_messages_unfinished'::regclass"
            )
        )
    place.ledger.migrate()
    with place.engine.begin() as program:
        asked = "SELECT count(*) FROM pg_index WHERE NOT indisvalid"
        assert program.execute(text(asked)).scalar_one() == 0


# ---- Whose session it is -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "limit"), [("postgresql", "300ms"), ("pooled", "0")])
def test_limit_of_a_session(name: str, limit: str, request: pytest.FixtureRequest) -> None:
    """A session of the ledger's own has the limit from the first; one of a pooler's, which other
    programs get as well, has none.
    """
    url = str(request.getfixturevalue(f"{name}_ledger_url"))
    with closing(open_ledger(url)) as ledger:
        _claim(ledger, "1")
        store = ledger._store
        assert isinstance(store, SqlStore)
        with store._engine.connect() as session:
            assert session.exec_driver_sql("SHOW lock_timeout").scalar_one() == limit
        engine = engine_on(url)
        with engine.connect() as program:
            assert program.exec_driver_sql("SHOW lock_timeout").scalar_one() == "0"
        engine.dispose()
