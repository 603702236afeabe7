"""What waits is found by an index: the work does not grow with what waits besides."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from tests.conditions import LIMIT_S, wait_until
from tests.records import key_of

from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import OUTBOX, WaitingMessage, lane_in, names_for, queue_named, retries_of
from oncely.stores.open_store import open_store
from oncely.stores.sql import SqlStore
from oncely.stores.sql import waiting_rows as rows_of
from oncely.stores.sql.sql_transaction import SqlTransaction
from oncely.stores.store import Listing

pytestmark = pytest.mark.in_turn("waiting plans")

_HOLD_S = 600.0
_FEW, _MANY = 300, 5_000
_TAKEN = 10
_RETRIES = retries_of("billing")
_LETTERS = Listing(_RETRIES, is_set_aside=True, limit=100)
_QUEUE = queue_named("jobs")

Work = Callable[[SqlTransaction], object]
T = TypeVar("T")


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def store(request: pytest.FixtureRequest) -> Iterator[SqlStore]:
    """A store in each kind of database, its table never analysed."""
    store = open_store(request.getfixturevalue(f"{request.param}_ledger_url"))
    assert isinstance(store, SqlStore)
    with closing(store):
        yield store


def _done(store: SqlStore, work: Callable[[SqlTransaction], T]) -> T:
    inside: Callable[[Any], T] = work
    return store.transaction(inside)


def _effort(store: SqlStore, work: Work) -> int:
    """How many rows and index entries a transaction reads; on SQLite, how many steps it takes."""
    kind = store._engine.dialect.name
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def measured(transaction: SqlTransaction) -> int:
        if kind != "sqlite":
            reads = _handler_reads if kind == "mysql" else _tuples_read
            before = reads(transaction)
            work(transaction)
            return reads(transaction) - before
        connection = transaction.link.connection.dbapi_connection
        connection.set_progress_handler(count, 1)
        work(transaction)
        connection.set_progress_handler(None, 0)
        return steps

    return _done(store, measured)


def _handler_reads(transaction: SqlTransaction) -> int:
    counts = transaction.run("SHOW SESSION STATUS LIKE 'Handler_read%%'").fetchall()
    return sum(int(count) for _, count in counts)


def _tuples_read(transaction: SqlTransaction) -> int:
    """What this session has read: the server adds what others have read when it pleases."""
    statement = (
        "SELECT sum(pg_stat_get_xact_tuples_returned(oid)) FROM pg_class WHERE oid = {0}"
        " OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = {0})"
    ).format("'waiting_messages'::regclass")
    return int(transaction.run(statement).fetchone()[0])


def _in_lane(queue: str, count: int) -> list[WaitingMessage]:
    """Messages of one ordering key in a queue."""
    names = names_for(count)
    return [
        WaitingMessage(
            name,
            "mail" if queue == OUTBOX else "",
            Message(name, key="anna"),
            Key("", "") if queue == _QUEUE else key_of(name),
            queue=queue,
            name=name,
            lane=lane_in(queue, "anna"),
        )
        for name in names
    ]


def _apart(queue: str, count: int) -> list[WaitingMessage]:
    """Messages of which none waits for another."""
    return [
        WaitingMessage(name, "", Message(name), key_of(name), queue=queue, name=name, lane=name)
        for name in names_for(count)
    ]


def _take(queue: str) -> Callable[[SqlTransaction], Sequence[WaitingMessage]]:
    alone = queue != OUTBOX
    return lambda at: at.take(queue, _TAKEN, _HOLD_S, one_per_lane=alone)


@pytest.mark.parametrize("queue", [_QUEUE, _RETRIES, OUTBOX], ids=["queue", "retries", "outbox"])
def test_one_lane(store: SqlStore, queue: str) -> None:
    """However many messages of one ordering key wait behind a held one, those of others are taken,
    and then the next of the key, by the same work.
    """
    efforts = []
    for count in (_FEW, _MANY - _FEW):
        _done(store, lambda at: at.keep(_in_lane(queue, count)))  # noqa: B023 - used here.
        _done(store, lambda at: at.keep(_apart(queue, 3 * _TAKEN)))
        [head] = _done(store, lambda at: at.take(queue, 1, _HOLD_S))
        taken: list[WaitingMessage] = []
        others = _effort(store, lambda at: taken.extend(_take(queue)(at)))  # noqa: B023 - as above.
        assert len({each.name for each in taken}) == _TAKEN
        assert not [each for each in taken if each.lane == head.lane]
        rest = _done(store, lambda at: at.take(queue, 9 * _TAKEN, _HOLD_S, one_per_lane=True))
        assert len(rest) == 2 * _TAKEN
        nothing = _effort(store, lambda at: taken.extend(_take(queue)(at)))  # noqa: B023 - as above.
        asked = _effort(store, lambda at: at.lanes(queue, {head.lane, "none"}))  # noqa: B023
        _done(store, lambda at: at.remove_held([head, *taken, *rest]))  # noqa: B023
        following: list[WaitingMessage] = []
        next_one = _effort(store, lambda at: following.extend(_take(queue)(at)))  # noqa: B023
        assert len(following) == (_TAKEN if queue == OUTBOX else 1)
        assert {each.lane for each in following} == {head.lane}
        assert min(each.number or 0 for each in following) == (head.number or 0) + 1
        _done(store, lambda at: at.remove_held(following))  # noqa: B023
        efforts.append((others, nothing, asked, next_one))
    few, many = efforts
    assert [b <= 2 * a + 50 for a, b in zip(few, many, strict=True)] == [True] * 4, efforts


def test_due_at_once(store: SqlStore) -> None:
    """Of thousands that are due at the same moment, one look frees a portion; the next look, and
    that of another worker meanwhile, frees another.
    """
    _done(
        store, lambda at: at.keep([replace(each, delay_s=1e-3) for each in _apart(_QUEUE, 3_000)])
    )
    wait_until(lambda: store.free_in_s(_QUEUE) == 0)

    def free(at: SqlTransaction) -> int:
        statement = f"SELECT count(*) FROM waiting_messages WHERE held_until = {at.dialect.always}"
        return int(at.run(statement).fetchone()[0])

    def taken_beside(at: SqlTransaction) -> list[str]:
        first = _take(_QUEUE)(at)
        # SQLite has one writer at a time.
        others = _take_elsewhere(store) if at.dialect.skip_locked else []
        return [each.name for each in (*first, *others)]

    names = _done(store, taken_beside)
    looks = 2 if len(names) > _TAKEN else 1
    assert len({*names}) == looks * _TAKEN
    assert _done(store, free) <= looks * 1_000 - len(names)
    while _done(store, _take(_QUEUE)):
        pass
    assert _done(store, lambda at: at.take(_QUEUE, _TAKEN, _HOLD_S)) == []
    assert _done(store, free) == 0


def _take_elsewhere(store: SqlStore) -> Sequence[WaitingMessage]:
    """What another worker takes while a transaction is open."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_done, store, _take(_QUEUE)).result(LIMIT_S)


@pytest.mark.parametrize("is_analysed", [False, True], ids=["unanalysed", "analysed early"])
def test_pages(store: SqlStore, is_analysed: bool) -> None:
    """A page of dead letters takes the same work however many there are, and however many messages
    wait besides; whatever the statistics say.
    """
    efforts = []
    for count in (_FEW, _MANY):
        rows = [*_apart(_QUEUE, count), *_apart(_RETRIES, count)]
        letters = [replace(each, is_set_aside=True) for each in _apart(_RETRIES, count)]
        _done(store, lambda at: at.keep([*rows, *letters]))  # noqa: B023 - used here.
        if is_analysed and count == _FEW:
            analyse = "ANALYZE TABLE" if store._engine.dialect.name == "mysql" else "ANALYZE"
            store._read(lambda at: at.run(f"{analyse} waiting_messages"))  # noqa: B023
        first: list[rows_of.Listed] = []

        def one(at: SqlTransaction, first: list[rows_of.Listed] = first) -> None:
            first.extend(rows_of.page(at, _RETRIES, _LETTERS, first[-1] if first else None))

        efforts += [_effort(store, one), _effort(store, one)]
        found = [each.number or 0 for each in store.listed(_LETTERS._replace(limit=10_000_000))]
        assert found == sorted({*found})
        assert len(found) == count + (_FEW if count == _MANY else 0)
    assert 0 < max(efforts[2:]) <= 2 * max(efforts[:2]) + 50, efforts
