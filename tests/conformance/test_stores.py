"""What each SQL store and the memory have to do, among many processes, too; and SQLite alone."""

import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.conformance.store_suite import RulesOnAStore, StatementsOfAStore
from tests.processes import (
    claim_all,
    exit_of,
    forked,
    key_of,
    migrate_and_count,
    run_at_once,
    start_completing,
)
from tests.records import granted

from oncely.core.commands import Duplicate
from oncely.core.errors import StoreUnavailable
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.store import Store
from oncely.testing import ManualClock

_DEADLINE_S = 60.0
_KEYS = int(os.environ.get("ONCELY_TEST_KEYS", "500"))

OpenSql = Callable[..., SqlStore]


class TestMemoryStore(RulesOnAStore, StatementsOfAStore):
    """Rules and statements on MemoryStore."""

    @pytest.fixture
    def store(self, clock: ManualClock) -> Store:
        return MemoryStore(clock)


class TestSqlStoreOnSqlite(RulesOnAStore, StatementsOfAStore):
    """Rules and statements on SqlStore, in a file."""

    @pytest.fixture
    def store(self, clock: ManualClock, open_sqlite: Callable[..., SqlStore]) -> Store:
        return open_sqlite(clock)


class TestSqlStoreOnPostgresql(StatementsOfAStore):
    """Statements of SqlStore on a PostgreSQL server."""

    metadata_is_exact = False

    @pytest.fixture
    def store(self, clock: ManualClock, postgresql_ledger_url: str, open_sql: OpenSql) -> Store:
        return open_sql(postgresql_ledger_url, clock)


class TestSqlStoreOnMariaDb(StatementsOfAStore):
    """Statements of SqlStore on a MariaDB server."""

    @pytest.fixture
    def store(self, clock: ManualClock, mysql_ledger_url: str, open_sql: OpenSql) -> Store:
        return open_sql(mysql_ledger_url, clock)


def test_processes_claim_the_same_keys(shared_url: str) -> None:
    """Twenty processes claim the same keys at once: each key is granted exactly once."""
    with closing(open_ledger(shared_url)) as ledger:
        ledger.migrate()
    answers = run_at_once(20, shared_url, claim_all, _KEYS, 100)
    assert sorted(number for answer in answers for number in answer) == list(range(_KEYS))


def test_processes_migrate_a_fresh_store(shared_url: str) -> None:
    """Ten processes migrate a fresh store at once: all succeed, and one table is there."""
    assert run_at_once(10, shared_url, migrate_and_count) == [0] * 10


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a SQLite file that does not exist yet."""
    return f"sqlite:///{tmp_path / 'ledger.db'}"


@pytest.fixture
def on_file(url: str) -> Iterator[Ledger]:
    """A ledger on the file at `url`, which has no table yet."""
    with closing(open_ledger(url)) as ledger:
        yield ledger


def test_fork_with_open_connections(url: str, on_file: Ledger, key: Key) -> None:
    """A child forked while connections are open uses the ledger, and so does its parent."""
    on_file.migrate()
    claim = granted(on_file.claim(key))
    child = forked(lambda: claim_all(on_file, 100))
    assert claim_all(on_file, 0) == []
    on_file.complete(claim)
    assert exit_of(child) == 0
    processing = (key_of(0).consumer, State.PROCESSING)
    assert on_file.counts() == {(key.consumer, State.COMPLETED): 1, processing: 100}
    _check_integrity(url)


@pytest.mark.parametrize("batch", [1, 500])
def test_kill_in_the_middle_of_batches(url: str, on_file: Ledger, batch: int) -> None:
    """After SIGKILL the file is good, each batch is whole, and what was answered is stored."""
    on_file.migrate()
    answered = _completed_until_killed(url, batch)
    _check_integrity(url)
    stored = on_file.counts()
    assert stored[key_of(0).consumer, State.COMPLETED] >= answered
    assert all(number % batch == 0 for number in stored.values())
    outcomes = on_file.claim_many([key_of(number) for number in range(answered)])
    assert all(isinstance(outcome, Duplicate) for outcome in outcomes)


def test_locked_file(
    open_sqlite: Callable[..., SqlStore], tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file locked beyond the busy timeout raises StoreUnavailable; afterwards all is well."""
    monkeypatch.setattr("oncely._util.sqlite_files.BUSY_TIMEOUT_S", 0.05)
    ledger = Ledger(open_sqlite())
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        ledger.claim(key)
    other.execute("ROLLBACK")
    other.close()
    granted(ledger.claim(key))


def _completed_until_killed(url: str, batch: int) -> int:
    """Kill a process that completes batches, after it answered for ten; how many it answered."""
    process, question = start_completing(url, batch)
    answered = 0
    while answered < 10 * batch:
        assert question.poll(_DEADLINE_S), "the process gave no answer"
        answered = question.recv()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(_DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    while question.poll():
        try:
            answered = question.recv()
        except EOFError:
            break
    return answered


def _check_integrity(url: str) -> None:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    try:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()
