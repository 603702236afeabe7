"""Behind PgBouncer in transaction mode, and whatever isolation level sessions begin with."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle, product
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url
from tests.conditions import wait_until
from tests.integration.drivers import engine_on
from tests.records import granted
from tests.servers import PgBouncer

from oncely.core.commands import Busy, Duplicate, Granted
from oncely.core.policy import Policy
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

THREADS, MESSAGES = 12, 40
_ENDLESS = Policy(tries=1_000)


@pytest.fixture
def ledgers(pooled_url: str) -> Iterator[list[Ledger]]:
    """Two ledgers with tables of their own, behind one pool of few sessions."""
    with ExitStack() as opened:
        both = [
            opened.enter_context(closing(open_ledger(pooled_url, table=name)))
            for name in ("first_table", "second_table")
        ]
        for ledger in both:
            ledger.migrate()
        yield both


def race(ledgers: list[Ledger]) -> dict[tuple[int, str], int]:
    """Let threads claim and complete the same messages in each ledger in turns; how often each was
    granted.
    """
    grants: dict[tuple[int, str], int] = {}
    lock = threading.Lock()

    def run(_: int) -> None:
        for n in range(MESSAGES):
            for place, ledger in enumerate(ledgers):
                outcome = ledger.claim(Key("billing", str(n)))
                if isinstance(outcome, Granted):
                    ledger.complete(outcome.claim)
                    with lock:
                        grants[place, str(n)] = grants.get((place, str(n)), 0) + 1
                else:
                    assert isinstance(outcome, Busy | Duplicate)

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(run, range(THREADS)))
    return grants


def test_nothing_leaks(pooled_url: str, ledgers: list[Ledger]) -> None:
    """Sessions are handed back as they were: other programs get none of our settings."""
    names = ("lock_timeout", "transaction_isolation", "plan_cache_mode", "enable_hashjoin")
    shown = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
    race(ledgers)
    ledgers[0].keep_step(granted(ledgers[0].claim(Key("billing", "with a step"))), "step", 1)
    url = pooled_url.partition("?")[0]
    with ExitStack() as opened:
        programs = [
            opened.enter_context(psycopg.connect(url, prepare_threshold=None))
            for _ in range(PgBouncer.SESSIONS)
        ]
        # Each is in a transaction now, and so has a session of its own.
        found = {program.execute(shown.encode()).fetchone() for program in programs}
        prepared = [program.execute("SELECT * FROM pg_prepared_statements") for program in programs]
        assert [each.fetchall() for each in prepared] == [[]] * PgBouncer.SESSIONS
    assert found == {("0", "read committed", "auto", "on")}


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
        assert set(race([one]).values()) == {1}
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
