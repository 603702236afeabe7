"""Behind PgBouncer in transaction mode, and whatever isolation level sessions begin with."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle, product
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url
from tests.conditions import wait_until
from tests.integration.drivers import engine_on
from tests.records import granted

from oncely.core.commands import Busy, Duplicate, Granted
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

THREADS, MESSAGES = 12, 40
_ENDLESS = Policy(tries=1_000)


def race(ledger: Ledger) -> list[int]:
    """Let threads claim and complete the same messages; which were granted."""
    grants: list[int] = []

    def run(_: int) -> None:
        for n in range(MESSAGES):
            outcome = ledger.claim(Key("billing", str(n)))
            if isinstance(outcome, Granted):
                ledger.complete(outcome.claim)
                grants.append(n)
            else:
                assert isinstance(outcome, Busy | Duplicate)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(run, range(THREADS)))
    return grants


@pytest.mark.parametrize("threshold", [None, 5])
def test_engine_says_whether_to_prepare(postgresql_url: str, threshold: int | None) -> None:
    """A ledger on a program's engine prepares statements, or not, as its connections do; also
    while the program has its engine's only connection.
    """
    url = make_url(postgresql_url).set(drivername="postgresql+psycopg")
    engine = create_engine(
        url, connect_args={"prepare_threshold": threshold}, pool_size=1, max_overflow=0
    )
    with engine.connect(), closing(open_ledger(engine)) as ledger:
        ledger.migrate()
        granted(ledger.claim(Key("billing", "1")))
        store = ledger._store
        assert _thresholds(store._engine) == {threshold}  # type: ignore[attr-defined]
    engine.dispose()


def _thresholds(engine: Engine) -> set[int | None]:
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        return {driver.prepare_threshold}


# ---- Isolation levels --------------------------------------------------------------------------


_LEVELS = ("read uncommitted", "read committed", "repeatable read", "serializable")


@pytest.mark.in_turn("isolation levels")
@pytest.mark.parametrize(
    ("kind", "level"),
    [*product(("postgresql", "mysql"), _LEVELS), ("pooled", "serializable")],
)
def test_isolation_levels(kind: str, level: str, request: pytest.FixtureRequest) -> None:
    """Whatever level sessions begin with, races have one winner, and no error."""
    url = request.getfixturevalue(f"{kind}_url")
    server = request.getfixturevalue("mariadb" if kind == "mysql" else "postgresql_url")
    with _all_at(level, kind, server):
        _check_races(url)


@contextmanager
def _all_at(level: str, kind: str, url: str) -> Iterator[None]:
    """Inside the block, new sessions of the database, or of MariaDB, begin with this level."""
    engine = engine_on(url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        if kind != "mysql":
            name = make_url(url).database
            change = f'ALTER DATABASE "{name}" SET default_transaction_isolation'
            connection.exec_driver_sql(f"{change} = '{level}'")
            yield
            return
        before = connection.exec_driver_sql("SELECT @@GLOBAL.tx_isolation").scalar_one()
        connection.exec_driver_sql(f"SET GLOBAL TRANSACTION ISOLATION LEVEL {level}")
        try:
            yield
        finally:
            connection.exec_driver_sql(f"SET GLOBAL tx_isolation = '{before}'")


def _check_races(url: str) -> None:
    with closing(open_ledger(url)) as one, closing(open_ledger(url)) as other:
        one.migrate()
        assert sorted(race(one)) == [*range(MESSAGES)]
        claims = one.claim_many([Key("batches", str(n)) for n in range(300)])
        takers = cycle((one, other))

        def extend(n: int) -> None:
            claim = granted(claims[n % 300])
            ledger = next(takers)
            ledger.extend_many([granted(each) for each in claims[n % 290 : n % 290 + 10]], "5m")
            ledger.keep_step(claim, "step", n)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(extend, range(0, 300, 5)))
        one.complete_many([granted(each) for each in claims])
        assert one.counts()["batches", State.COMPLETED] == 300


# ---- Plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", ["", "?prepare_threshold=none"])
def test_no_batch_reads_the_whole_table(postgresql_url: str, threshold: str) -> None:
    """Batches find records by their key in a large table that was never analysed, whether their
    plans were made, and kept, when it was small, or are made anew each time.
    """
    ids = [f"message-{n}" for n in range(50_000)]
    keys = [Key("billing", message_id) for message_id in ids]
    with psycopg.connect(postgresql_url, autocommit=True) as program:
        with closing(open_ledger(f"{postgresql_url}{threshold}")) as ledger:
            ledger.migrate()
            program.execute("ALTER TABLE processed_messages SET (autovacuum_enabled = off)")
            for _ in range(8):
                _in_batches(ledger, keys[:100])
            program.execute(_FILL, [ids])
            assert program.execute(_NEVER_ANALYSED).fetchone() == (-1,)
            ledger.close()
            before = _scans(program)
            for _ in range(8):
                _in_batches(ledger, keys[:1000])
        # A session that ends tells what it has read.
        assert _scans(program) == before


_FILL = (
    "INSERT INTO processed_messages (message_id, provider, status, first_processed_at,"
    " last_processed_at) SELECT i, 'billing', 'failed', now(), now()"
    " FROM unnest(%s::text[]) AS i ON CONFLICT DO NOTHING"
)
_NEVER_ANALYSED = "SELECT reltuples FROM pg_class WHERE relname = 'processed_messages'"
_SESSIONS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
)
_READ = "SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'processed_messages'"


def _scans(program: "psycopg.Connection[Any]") -> int:
    """How often sessions that have ended read the whole table."""
    wait_until(lambda: program.execute(_SESSIONS.encode()).fetchone() == (0,))
    program.execute("SELECT pg_stat_force_next_flush()")
    found = program.execute(_READ.encode()).fetchone()
    assert found is not None
    return int(found[0])


def _in_batches(ledger: Ledger, keys: list[Key]) -> None:
    """Claim, extend, load, defer for, fail: every statement of a batch."""
    claims = [granted(outcome) for outcome in ledger.claim_many(keys, policy=_ENDLESS)]
    ledger.extend_many(claims, "5m")
    ledger.find_many(keys)
    ledger.mailbox.waiting(keys)
    ledger.fail_many(claims, ["no"] * len(claims))
