"""Transactions of a ledger's own: what they cost, and what is left when they are broken off."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from tests.conformance.conftest import ledger_url_of
from tests.integration.lines import Line
from tests.integration.others import Other
from tests.integration.test_schema import _run as run_by_hand
from tests.records import PARENT, deferred, granted, ids_of

from oncely.core.errors import StoreError
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.open_store import open_store
from oncely.stores.sql import SqlStore
from oncely.stores.store import Transaction

_KINDS = ("sqlite", "postgresql", "mysql")


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
