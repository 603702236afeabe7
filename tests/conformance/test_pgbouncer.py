"""SqlStore behind PgBouncer in transaction mode: whatever differs from a session of one's own."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from tests.conformance.store_suite import RacesOnAStore
from tests.records import Doing, Swap, deferred, fresh, granted, insert, swap
from tests.servers import PgBouncer

from oncely.core.record import State
from oncely.core.rules import PURGEABLE
from oncely.core.waiting import OUTBOX
from oncely.stores.names import TableName
from oncely.stores.sql import SqlStore
from oncely.stores.store import (
    KeyRange,
    Listing,
    Look,
    PutBack,
    Query,
    Store,
    Wanted,
)
from oncely.testing import ManualClock

OpenSql = Callable[..., SqlStore]

_ROUNDS = 7
"""Psycopg prepares a statement that it is given for the sixth time."""


class TestRacesBehindPgBouncer(RacesOnAStore):
    """Races of many clients, which are lent few sessions for a transaction each."""

    @pytest.fixture
    def store(self, clock: ManualClock, pooled_ledger_url: str, open_sql: OpenSql) -> Store:
        return open_sql(pooled_ledger_url, clock)


def test_each_statement_of_two_clients(pooled_url: str, open_sql: OpenSql) -> None:
    """Two clients with tables of their own repeat each statement in turns, over the same few
    sessions: each is answered from its own tables, and leaves nothing in a session.
    """
    both = [Doing(open_sql(pooled_url, None, TableName(name))) for name in ("one", "two")]
    for doing in both:
        doing.store.migrate()
    for number in range(_ROUNDS):
        for doing in both:
            _use_records(doing.store, str(number))
            _use_what_waits(doing, str(number))
    for doing in both:
        assert doing.store.tallies()["billing", State.COMPLETED].count == _ROUNDS
        doing.store.close()
    _check_sessions(pooled_url.partition("?")[0])


def _use_records(store: Store, name: str) -> None:
    record = fresh(name)
    assert insert(store, [record]) == {record.key}
    there = store.load([record.key]).records[record.key]
    new = there._replace(state=State.COMPLETED, lease_until=None, version=there.version + 1)
    assert swap(store, [Swap(there, new)]) == {record.key}
    look = Look([Query("billing")], size=1_000)
    pages = [*store.read(KeyRange(), Wanted(["billing"]))]
    for found in (
        store.scan(Query("billing", State.COMPLETED)),
        [record for page in pages for record in page],
        store.window(look).keys,
    ):
        assert len(found) == int(name) + 1
    assert len(store.of_message(name)) == 1
    assert store.horizons(["billing"]) == {}
    assert store.purge(Query("billing", older_than_s=3_600), PURGEABLE) == 0
    store.keep_retention("billing", 60.0)
    assert store.retentions() == {"billing": 60.0}


def _use_what_waits(doing: Doing, name: str) -> None:
    store: Any = doing.store
    claim = granted(doing.ledger.claim(fresh(f"step {name}", "mailing").key))
    doing.ledger.keep_step(claim, "step", name)
    assert doing.ledger.steps(claim.key) == {"step": name}
    doing.keep([deferred(name, parent=claim.key), deferred(name, "other", parent=claim.key)])
    first, second = doing.take(9, 60.0, counts=True)
    doing.put_back([PutBack(first, "no", None)])
    assert doing.held([first, second]) == {second.number}
    assert len([*store.listed(Listing(OUTBOX, is_set_aside=True))]) == 1
    assert store.free_in_s(OUTBOX) == pytest.approx(60, abs=60)
    doing.free([first])
    assert doing.remove_held([second]) == {second.number}
    doing.remove(doing.waiting([claim.key]))
    assert not store.backlogs()
    store.bind("in", [name])
    assert ("in", name) in store.bindings("in")
    store.wait_for_messages(0.001)


def _check_sessions(url: str) -> None:
    """Nothing of theirs is left in any session: no statement, no setting, no channel."""
    left = (
        "SELECT (SELECT count(*) FROM pg_prepared_statements),"
        " (SELECT count(*) FROM pg_listening_channels()), current_setting('lock_timeout'),"
        " current_setting('transaction_isolation'), current_setting('plan_cache_mode'),"
        " current_setting('enable_hashjoin')"
    )
    with ExitStack() as opened:
        # Each is in a transaction now, and so has a session of its own.
        programs = [
            opened.enter_context(psycopg.connect(url, prepare_threshold=None))
            for _ in range(PgBouncer.SESSIONS)
        ]
        found = {program.execute(left).fetchone() for program in programs}
    assert found == {(0, 0, "0", "read committed", "auto", "on")}
