"""Transactions of a ledger's own: what they cost, and what is left when they are broken off."""

import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import psycopg
import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.conformance.conftest import ledger_url_of
from tests.integration.lines import Line
from tests.integration.others import Other
from tests.integration.test_schema import _run as run_by_hand
from tests.integration.transacting import WAITING
from tests.records import PARENT, deferred, granted, ids_of
from tests.servers import Postgresql

from oncely.core.errors import StoreError
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.open_store import open_store
from oncely.stores.sql import SqlStore
from oncely.stores.store import Transaction

ROOT = Path(__file__).parents[2]
_KINDS = ("sqlite", "postgresql", "mysql")
_WORKERS = 3


@pytest.fixture(params=_KINDS)
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a ledger without a row in a database of each kind that has transactions."""
    return ledger_url_of(request.param, request)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    """A store on that database."""
    yield from _opened(url)


def _opened(url: str) -> Iterator[SqlStore]:
    store = open_store(url)
    assert isinstance(store, SqlStore)
    with closing(store):
        store.migrate()
        yield store


# ---- Costs -------------------------------------------------------------------------------------


def test_cost_on_postgresql(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To handle a message and to defer others takes two statements and a transaction's two ends."""
    asked: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(cursor: Any, query: Any, *args: Any, **options: Any) -> Any:
        asked.append(str(query).split()[0])
        return execute(cursor, query, *args, **options)

    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        claims = [granted(ledger.claim(Key("billing", str(n)))) for n in range(2)]
        monkeypatch.setattr(psycopg.Cursor, "execute", noted)
        for claim in claims:
            asked.clear()
            messages = [deferred(str(n), parent=claim.key, position=n) for n in range(3)]
            ledger.handled(claim, None, messages)
            assert asked == ["BEGIN", "UPDATE", "WITH", "COMMIT"]


# ---- What goes wrong inside --------------------------------------------------------------------


def test_error_ends_a_transaction(store: SqlStore, url: str) -> None:
    """After an error every further call raises that error, and nothing is stored, also where the
    work goes on and ends well.
    """
    run_by_hand(url, "DROP TABLE message_steps;")
    errors = []

    def work(transaction: Transaction) -> str:
        transaction.keep([deferred("m")])
        for call in (transaction.steps_of, transaction.waiting, transaction.load):
            with pytest.raises(StoreError) as raised:
                call([PARENT])
            errors.append(raised.value)
        return "well"

    with pytest.raises(StoreError, match=r"migrate\(\)"):
        store.transaction(work)
    assert len(set(map(id, errors))) == 1
    assert not store.backlogs()


def test_session_ended_inside(other: Other, request: pytest.FixtureRequest) -> None:
    """Where the session ends in the middle, all is done again, and stored once."""
    for store in _opened(request.getfixturevalue(f"{other.kind}_url")):
        runs: list[int] = []

        def work(transaction: Transaction, runs: list[int] = runs) -> None:
            runs.append(len(runs))
            transaction.keep_step(PARENT, f"run {len(runs)}", 1)
            if len(runs) == 1:
                while other.end_one():
                    pass
            transaction.keep([deferred("m")])

        store.transaction(work)
        assert runs == [0, 1]
        with closing(Ledger(store)) as ledger:
            assert ledger.steps(PARENT) == {"run 2": 1}
            assert ids_of(ledger.mailbox.deferred(PARENT)) == ["m"]


# ---- Lost replies ------------------------------------------------------------------------------


@pytest.mark.parametrize("word", [b"BEGIN", b"waiting_messages", b"COMMIT"])
def test_handled_with_deferred(line: Line, delivers: bool, word: bytes) -> None:
    """Handled and deferred are stored once, whatever the line did."""
    claim = granted(line.ledger.claim(PARENT))
    line.proxy.cut(word, delivers=delivers)
    line.ledger.handled(claim, {"total": 3}, [deferred(str(n), position=n) for n in range(3)])
    record = line.stored(PARENT)
    assert (record.state, record.result, record.attempts) == (State.HANDLED, {"total": 3}, 1)
    assert ids_of(line.other.mailbox.deferred(PARENT)) == ["0", "1", "2"]


def test_sent(line: Line, delivers: bool) -> None:
    """What was sent is sent, and its parent completed, whatever the line did."""
    line.other.handled(granted(line.other.claim(PARENT)), None, [deferred("m")])
    messages = line.other.mailbox.take(1, "60s")
    line.proxy.cut(b"COMMIT", delivers=delivers)
    line.ledger.mailbox.sent(messages)
    assert line.stored(PARENT).state is State.COMPLETED
    assert line.other.mailbox.deferred(PARENT) == []


def test_keep_step(line: Line, delivers: bool) -> None:
    """A step is kept once, whatever the line did."""
    claim = granted(line.ledger.claim(PARENT))
    line.proxy.cut(b"COMMIT", delivers=delivers)
    line.ledger.keep_step(claim, "step", [1])
    assert line.other.steps(PARENT) == {"step": [1]}
    line.ledger.complete(claim)


def test_forget(line: Line, delivers: bool) -> None:
    """What is forgotten is gone with all that was kept with it, whatever the line did."""
    claim = granted(line.other.claim(PARENT))
    line.other.keep_step(claim, "step", 1)
    line.other.handled(claim, None, [deferred("m")])
    line.proxy.cut(b"COMMIT", delivers=delivers)
    line.ledger.forget(PARENT)
    assert line.other.find(PARENT) is None
    assert (line.other.steps(PARENT), line.other.mailbox.deferred(PARENT)) == ({}, [])


# ---- Kills -------------------------------------------------------------------------------------


@pytest.mark.in_turn("processes are killed")
def test_killed_workers(url: str) -> None:
    """After SIGKILL in the middle of transactions each is stored whole or not at all."""
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        with _Workers(url) as workers:
            workers.await_more(60)
            for _ in range(_WORKERS - 1):
                workers.kill_one()
                workers.await_more(10)
        _check_whole(ledger, workers.handled)


@pytest.mark.in_turn("processes are killed")
def test_killed_postgresql(private_postgresql: Postgresql) -> None:
    """After a server was killed in the middle of transactions each is whole, or not there."""
    url = private_postgresql.url
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        with _Workers(url) as workers:
            for _ in range(3):
                workers.await_more(30)
                private_postgresql.kill()
                private_postgresql.start()
            workers.await_more(30)
        _check_whole(ledger, workers.handled)


class _Workers:
    """Processes that handle messages, until they are killed at the end."""

    def __init__(self, url: str) -> None:
        self.handled: dict[str, list[int]] = defaultdict(list)
        """What each was told is handled."""
        self._names = [f"worker-{number}" for number in range(_WORKERS)]
        self._command = [sys.executable, "-m", "tests.integration.transacting", url]

    def __enter__(self) -> "_Workers":
        self._processes = [
            subprocess.Popen(
                [*self._command, name],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in self._names
        ]
        pairs = zip(self._names, self._processes, strict=True)
        self._readers = [Thread(target=self._read, args=pair) for pair in pairs]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for reader in self._readers:
            reader.join(LIMIT_S)
        for process in self._processes:
            process.communicate()

    def await_more(self, count: int) -> None:
        """Return once so many more messages are handled by all of them."""
        before = self._count()
        wait_until(lambda: self._count() >= before + count)

    def kill_one(self) -> None:
        """Kill one of those that live, whatever it is doing."""
        process = next(process for process in self._processes if process.poll() is None)
        process.kill()
        process.wait(LIMIT_S)

    def _count(self) -> int:
        return sum(map(len, list(self.handled.values())))

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for text in process.stdout:
            # Without its end a line was broken off.
            if text.endswith("\n"):
                self.handled[name].append(int(text))


def _check_whole(ledger: Ledger, handled: dict[str, list[int]]) -> None:
    """Whatever was handled has deferred all, whatever was not has deferred nothing, and what
    somebody was told is so.
    """
    records = {record.key: record for record in ledger.scan(limit=100_000)}
    waiting = Counter(message.parent for message in ledger.mailbox.take(100_000, "1h"))
    for key, record in records.items():
        assert record.state in (State.HANDLED, State.PROCESSING)
        is_handled = record.state is State.HANDLED
        assert waiting.pop(key, 0) == (WAITING if is_handled else 0)
        assert ledger.steps(key) == {"step": key.message_id} or not is_handled
    assert waiting == {}
    told = {Key(name, str(number)) for name, numbers in handled.items() for number in numbers}
    assert len(told) >= 60
    assert [key for key in told if records[key].state is not State.HANDLED] == []
