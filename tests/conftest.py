"""Fixtures that tests of every kind share."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import certifi
import pytest
from hypothesis import HealthCheck, settings
from tests.meddling import MeddlingStore
from tests.records import granted
from tests.servers import MissingProgram, spark_kafka_jars
from tests.turns import fix_turn, not_today, report_line

from oncely._util import clock as process_clock
from oncely.core.record import Claim, Key
from oncely.ledger.ledger import Ledger
from oncely.stores.memory_store import MemoryStore
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import sqlite_engine
from oncely.stores.store import Clock
from oncely.testing import ManualClock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["tests.server_fixtures"]

OpenSqlite = Callable[..., SqlStore]


def pytest_configure() -> None:
    """Before other processes are started, which are to collect the same tests."""
    fix_turn()
    # How long an example takes is no matter of the tests.
    settings.register_profile(
        "oncely", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("oncely")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has its turn on another day."""
    left_out = not_today(items)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Below the header, which `-q` leaves out."""
    if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
        terminal.write_line(report_line())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """See `_let_propagate`."""
    try:
        yield
    finally:
        _let_propagate()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """See `_let_propagate`."""
    try:
        yield
    finally:
        _let_propagate()


def _let_propagate() -> None:
    """Pytest puts the handler of `caplog` into loggers that do not propagate; those that PySpark
    makes for errors of queries put a formatter of their own into it, for ever.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.endswith("QueryContextLogger") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of all authorities for certificates one is enough, as no test asks any: PyMySQL and httpx
    read them all for each connection, with TLS or without, which takes most of it.
    """
    first, end, _ = certifi.contents().partition("-----END CERTIFICATE-----")
    file = tmp_path_factory.mktemp("authority") / "one.pem"
    file.write_text(f"{first}{end}\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture
def spark(shared_spark: "SparkSession") -> "SparkSession":
    """One for all tests of a process: it tries a failed task again, and its Python workers are
    ready at once.
    """
    from oncely.spark.session import make_active

    # A child that a test has forked ends the connection on whose thread it was the active one.
    make_active(shared_spark)
    return shared_spark


@pytest.fixture(scope="session")
def shared_spark() -> Iterator["SparkSession"]:
    """The same, for fixtures that live longer than a test."""
    from oncely.spark.session import open_session

    settings = {
        "spark.master": "local[2,4]",
        "spark.sql.shuffle.partitions": "2",
    }
    with suppress(MissingProgram):
        settings["spark.jars"] = spark_kafka_jars()
    session = open_session("tests", settings)
    yield session
    session.stop()


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock, moved by hand."""
    return ManualClock()


@pytest.fixture
def meddling(clock: ManualClock) -> MeddlingStore:
    """A store in memory that reads `clock`, and in which a test can meddle."""
    return MeddlingStore(MemoryStore(clock))


class _Hurried(process_clock.Clock):
    """A clock of the process on which whoever waits has waited at once."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_s

    def sleep(self, seconds: float) -> None:
        self._ahead_s += seconds

    async def pause(self, seconds: float) -> None:
        self._ahead_s += seconds


@pytest.fixture
def hurried() -> Iterator[None]:
    """Nobody waits in earnest for a store that is away."""
    with process_clock.replaced_by(_Hurried()):
        yield


@pytest.fixture
def ledger(meddling: MeddlingStore) -> Iterator[Ledger]:
    """The ledger over `meddling`."""
    with closing(Ledger(meddling)) as ledger:
        yield ledger


@pytest.fixture
def rival(meddling: MeddlingStore) -> Iterator[Ledger]:
    """Another worker on the same records, whom nobody meddles with."""
    with closing(Ledger(meddling.store)) as ledger:
        yield ledger


@pytest.fixture
def key() -> Key:
    """The key that tests of one message use."""
    return Key("billing", "abc-123")


@pytest.fixture
def claim(ledger: Ledger, key: Key) -> Claim:
    """A claim on `key`, with a lease of 60 seconds."""
    return granted(ledger.claim(key, "60s"))


@pytest.fixture
def open_sqlite(sqlite_ledger_url: str) -> Iterator[OpenSqlite]:
    """Opens stores on one SQLite file with a migrated ledger, and closes them all at the end."""
    file = Path(sqlite_ledger_url.removeprefix("sqlite:///"))
    with ExitStack() as opened:

        def open_store(clock: Clock | None = None) -> SqlStore:
            store = SqlStore(sqlite_engine(file), clock=clock)
            opened.callback(store.close)
            return store

        yield open_store
