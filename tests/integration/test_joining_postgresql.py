"""Transactions of PostgreSQL that begin with a claim."""

from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import Connection, Engine, text
from tests.integration.callers import Place, opened
from tests.integration.joiners import engine_on
from tests.records import granted

from oncely.core.errors import ConfigError
from oncely.core.record import Key, State
from oncely.engine.transaction import Inbox

KEY = Key("billing", "abc-123")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A ledger and business rows in one PostgreSQL database."""
    with opened("postgresql", request) as place:
        yield place


@pytest.fixture
def engine(place: Place) -> Iterator[Engine]:
    """A program's engine, which has one connection."""
    engine = engine_on(place.url, pool_size=1, max_overflow=0)
    yield engine
    engine.dispose()


CallersTransaction = Callable[[Inbox, Connection], object]


def transact(place: Place, engine: Engine, work: CallersTransaction) -> None:
    """Do `work` in a transaction that the ledger has joined."""
    with engine.begin() as connection, place.ledger.transaction(connection) as inbox:
        work(inbox, connection)


def complete(inbox: Inbox, message_id: str) -> None:
    """Handle a message."""
    inbox.complete(granted(inbox.claim(Key("billing", message_id))))


def test_isolation_level(place: Place) -> None:
    """A transaction begins as its connection says."""
    engine = engine_on(place.url, isolation_level="SERIALIZABLE")

    def work(inbox: Inbox, connection: Connection) -> None:
        complete(inbox, "abc-123")
        level = connection.execute(text("SHOW transaction_isolation")).scalar_one()
        assert level == "serializable"

    transact(place, engine, work)
    engine.dispose()
    assert place.find(KEY).state is State.COMPLETED


def test_read_only(place: Place, engine: Engine) -> None:
    """A connection that is set to write does so, whatever its server's default is."""
    with engine.connect() as connection:
        raw = connection.connection.driver_connection
        assert isinstance(raw, psycopg.Connection)
        raw.execute("SET default_transaction_read_only = on")
        raw.commit()
        raw.read_only = False
        with place.ledger.transaction(connection) as inbox:
            complete(inbox, "abc-123")
        connection.commit()
        raw.read_only = None
    assert place.find(KEY).state is State.COMPLETED


def test_pipeline(place: Place) -> None:
    """A connection that does not wait for answers cannot tell whether a claim was granted."""
    with (
        psycopg.connect(place.url) as connection,
        connection.pipeline(),
        pytest.raises(ConfigError, match="pipeline"),
        place.ledger.transaction(connection) as inbox,
    ):
        inbox.claim(KEY)
    assert place.ledger.find(KEY) is None


def test_error_of_the_first_statement(place: Place, engine: Engine) -> None:
    """What goes wrong is told as ever, and leaves the connection fit for use."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_messages RENAME TO elsewhere"))
    with pytest.raises(Exception, match="oncely migrate"):
        transact(place, engine, lambda inbox, _: complete(inbox, "abc-123"))
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO processed_messages"))
    transact(place, engine, lambda inbox, _: complete(inbox, "abc-123"))
    assert place.find(KEY).state is State.COMPLETED
