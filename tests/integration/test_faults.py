"""Sessions that are ended, and transactions of others that go first."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event

import pytest
from pymysql.err import InternalError
from sqlalchemy.event import listen
from tests.conditions import LIMIT_S, wait_until
from tests.integration.others import Other
from tests.records import granted

from oncely.core.commands import Duplicate, Granted, Written
from oncely.core.errors import StoreError, StoreUnavailable
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.sql import SqlStore, record_rows
from oncely.stores.sql.dialect import Fault

_MESSAGES = int(os.environ.get("ONCELY_TEST_ENDED_SESSIONS", "500"))
_CONSUMER = "billing"
_A, _B = Key(_CONSUMER, "a"), Key(_CONSUMER, "b")


@pytest.fixture
def url(other: Other, request: pytest.FixtureRequest) -> str:
    """The URL of that database."""
    return str(request.getfixturevalue(f"{other.kind}_url"))


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """A ledger on that database."""
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        yield ledger


# ---- Sessions that are ended -------------------------------------------------------------------


def test_ended_sessions(ledger: Ledger, other: Other, url: str) -> None:
    """While a session is ended every 50 ms all messages go through, each once.

    A caller whose reply is lost again and again is told that the store is unavailable: that is
    rare, and whatever it had asked may be asked again.
    """
    threads = 4
    done = Event()
    unavailable: list[int] = []

    def end_sessions() -> int:
        ended = 0
        while not done.wait(0.05):
            ended += other.end_one()
        return ended

    def work(thread: int) -> None:
        # Each its own, or their calls would go to the store together.
        with closing(open_ledger(url)) as ledger:
            for n in range(thread, _MESSAGES, threads):
                wait_until(lambda n=n: _is_completed(ledger, n, unavailable))  # type: ignore[misc]

    with ThreadPoolExecutor(threads + 1) as pool:
        ended = pool.submit(end_sessions)
        try:
            list(pool.map(work, range(threads)))
        finally:
            done.set()
        ends = ended.result()
        assert ends > 3
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): _MESSAGES}
    records = list(ledger.scan(limit=_MESSAGES))
    assert sorted(record.result for record in records) == list(range(_MESSAGES))
    again = {record.result for record in records if record.attempts > 1}
    assert again <= set(unavailable)
    assert len(unavailable) <= ends / 5


def _is_completed(ledger: Ledger, n: int, unavailable: list[int]) -> bool:
    try:
        outcome = ledger.claim(Key(_CONSUMER, str(n)), "1s")
        if isinstance(outcome, Granted):
            ledger.complete(outcome.claim, n)
            return True
    except StoreUnavailable:
        unavailable.append(n)
        return False
    # Its own, of which it was not told: free again when the lease is over, or else completed.
    assert n in unavailable
    return isinstance(outcome, Duplicate)


def test_session_ended_while_it_is_given_back(ledger: Ledger, other: Other) -> None:
    """A session that ends between the last answer and its return to the pool troubles nobody."""
    ledger.complete(granted(ledger.claim(_A)))
    store = ledger._store
    assert isinstance(store, SqlStore)

    def end_sessions(*_: object) -> None:
        while other.end_one():
            pass

    listen(store._engine, "after_cursor_execute", end_sessions)
    # More often than the pool has places for connections.
    for _ in range(6):
        assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 1}
        assert [record.key for record in ledger.scan()] == [_A]


# ---- Others go first ---------------------------------------------------------------------------


def test_deadlock(ledger: Ledger, other: Other) -> None:
    """A batch that loses in a deadlock is written when the other is through."""
    claims = [granted(outcome) for outcome in ledger.claim_many([_A, _B])]
    with _winning(other), ThreadPoolExecutor(1) as pool:
        other.lock(_B)
        completed = pool.submit(ledger.complete_many, claims, [1, 2])
        other.await_waiters()
        # The ledger has the first and waits for the second.
        other.lock(_A)
        other.run("COMMIT")
        outcomes = completed.result(LIMIT_S)
    assert [type(outcome) for outcome in outcomes] == [Written] * 2
    assert ledger.counts() == {(_CONSUMER, State.COMPLETED): 2}


def test_deadlock_in_a_later_batch(
    ledger: Ledger, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a later batch is tried again, what was claimed in an earlier one is no other's."""
    monkeypatch.setattr(record_rows, "MOST_ROWS", 10)
    keys = [Key(_CONSUMER, f"message-{n:02}") for n in range(20)]
    insert = (
        "INSERT INTO processed_messages"
        " (message_id, provider, status, first_processed_at, last_processed_at)"
        f" VALUES (%s, '{_CONSUMER}', 'processing', now(), now())"
    )
    with _winning(other), ThreadPoolExecutor(1) as pool:
        other.run(insert, "message-19")
        claimed = pool.submit(ledger.claim_many, keys)
        other.await_waiters()
        other.run(insert, "message-15")
        other.run("ROLLBACK")
        outcomes = claimed.result(LIMIT_S)
    assert [type(outcome) for outcome in outcomes] == [Granted] * 20
    assert ledger.counts() == {(_CONSUMER, State.PROCESSING): 20}


@contextmanager
def _winning(other: Other) -> Iterator[None]:
    """A transaction that wins each deadlock: by patience, or by how much would be undone."""
    other.run("CREATE TABLE weight (id INT)")
    if other.kind == "postgresql":
        other.run("SET deadlock_timeout = '1min'")
    other.run("BEGIN")
    other.run(f"INSERT INTO weight VALUES {', '.join(['(1)'] * 1_000)}")
    yield


def test_row_with_an_unknown_status(ledger: Ledger, other: Other) -> None:
    """A row that somebody gave a status of his own is nobody's to claim, and is not counted."""
    ledger.claim(_A)
    other.run("UPDATE processed_messages SET status = 'paused'")
    with pytest.raises(StoreError, match=r"status is 'paused', not one of processing, "):
        ledger.claim(_A)
    assert list(ledger.scan()) == []
    assert ledger.counts() == {}


def test_the_last_words_of_a_server_are_no_answer(mysql_ledger_url: str) -> None:
    """MariaDB may end a session in the midst of its answer: PyMySQL then counts wrong."""
    with closing(open_ledger(mysql_ledger_url)) as ledger:
        store = ledger._store
        assert isinstance(store, SqlStore)
        error = InternalError("Packet sequence number wrong - got 1 expected 2")
        assert store._dialect.fault(error) is Fault.LOST
