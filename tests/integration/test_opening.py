"""Opening a ledger on a server: by URL or Engine, and what is said where it cannot be opened."""

import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from tests.conformance.conftest import url_of
from tests.records import granted
from tests.servers import free_port

from oncely.core.errors import ConfigError, StoreError, StoreUnavailable
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.sources import open_source
from oncely.transports.open_transport import open_transport

_KINDS = ("sqlite", "postgresql", "mysql")
_SECRET = "hunter2"


@pytest.fixture(params=_KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind that an Engine can be for."""
    return url_of(request.param, request, tmp_path)


def check_usable(ledger: Ledger, key: Key) -> None:
    """The ledger makes its table, and works."""
    with closing(ledger):
        ledger.migrate()
        ledger.complete(granted(ledger.claim(key)))


# ---- By URL ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    [
        *("postgres", "postgresql+psycopg2", "postgresql+asyncpg"),
        *("mariadb", "mariadb+mariadbconnector", "mysql+mysqldb"),
    ],
)
def test_spellings(scheme: str, key: Key, request: pytest.FixtureRequest) -> None:
    """A URL in another spelling, or with another driver, is that of the same server."""
    kind = "postgresql" if scheme.startswith("postgres") else "mysql"
    url = request.getfixturevalue(f"{kind}_url")
    check_usable(open_ledger(url.replace(kind, scheme, 1)), key)


def test_settings_in_a_url(postgresql_url: str, mysql_url: str, key: Key) -> None:
    """What a driver takes in a URL is taken, beside what the ledger sets itself."""
    options = "?connect_timeout=3&application_name=mine&options=-c%20search_path%3Dpublic"
    check_usable(open_ledger(postgresql_url + options), key)
    check_usable(open_ledger(mysql_url + "?connect_timeout=3&charset=utf8mb4"), key)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((url, ".*not of a known kind; write ") for url in ("", "nonsense", "oracle://host/x")),
        *((url, ".*not of a known kind; write ") for url in ("://", "billing.db", "http://host/x")),
        *((url, '.*write "sqlite:///') for url in ("sqlite://", "sqlite:///", "sqlite:/x.db")),
        *((url, '.*write "postgresql://') for url in ("postgresql:", "postgresql://h:port/x")),
        *((url, '.*write "') for url in ("mysql://[::1/x", "mariadb", "postgres:x@h/y")),
        *((url, ".* names no database") for url in ("postgresql://a@host", "postgres://")),
        ("mysql://anna@host/", ".* names no database"),
        ("postgresql://a:p@ss@host/x", "the password in the URL has an @ .* write %40"),
        ("mysql://a:p@s@s@host/x", "the password in the URL has an @ .* write %40"),
    ],
)
def test_refused(url: str, said: str) -> None:
    """What is not a URL of a known kind, or names no database, is refused in one line that says
    what to type.
    """
    with pytest.raises(ConfigError, match=rf"^ledger: {said}[^\n]*$"):
        open_ledger(url)


def test_unknown_setting(postgresql_url: str, mysql_url: str) -> None:
    """What the driver does not know is an error at the first use, which names it; a value that
    cannot be meant is told when the ledger is opened.
    """
    with pytest.raises(ConfigError, match='write "none"'):
        open_ledger(f"{postgresql_url}?prepare_threshold=never")
    for url in (postgresql_url, mysql_url):
        with pytest.raises(StoreError, match="colour"):
            open_ledger(f"{url}?colour=blue").migrate()


# ---- By Engine ---------------------------------------------------------------------------------


def test_engine(url: str, key: Key) -> None:
    """A SQLAlchemy Engine opens the same database, and stays as it was for its owner."""
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql"}
    at = make_url(url)
    engine = create_engine(at.set(drivername=drivers.get(at.drivername, at.drivername)))
    try:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE notes (id INT)"))
            with closing(open_ledger(engine, table="mine")) as ledger:
                check_usable(ledger, key)
            connection.rollback()
        with closing(open_ledger(url, table="mine")) as ledger:
            assert ledger.find(key) is not None
    finally:
        engine.dispose()


def test_engine_without_a_file() -> None:
    """An Engine in memory would be another for each connection: it is refused."""
    with pytest.raises(ConfigError, match="memory://"):
        open_ledger(create_engine("sqlite://"))


# ---- Drivers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("open_it", "url", "driver", "extra"),
    [
        (open_ledger, "postgresql://anna@host/x", "psycopg", "postgresql"),
        (open_ledger, "postgres://anna@host/x", "psycopg", "postgresql"),
        (open_ledger, "mysql://anna@host/x", "pymysql", "mysql"),
        (open_ledger, "mariadb://anna@host/x", "pymysql", "mysql"),
        (open_transport, "amqp://host", "pika", "rabbitmq"),
        (open_transport, "kafka://host", "confluent_kafka", "kafka"),
        (partial(open_source, queue="q"), "tls://host", "nats", "nats"),
        (partial(open_source, queue="q"), "rediss://host", "redis", "redis"),
        (partial(open_source, queue="q"), "sqs://eu-central-1", "boto3", "sqs"),
    ],
)
@pytest.mark.parametrize("is_known", [True, False])
def test_missing_driver(
    open_it: Callable[[str], object],
    url: str,
    driver: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_known: bool,
) -> None:
    """A driver that is not installed is named, with what installs it."""
    ours = ["oncely.sources.", "oncely.transports.kafka", "oncely.transports.rabbitmq"]
    if not is_known:
        ours += ["oncely.stores.sql.postgresql", "oncely.stores.sql.mysql"]
    for name in [name for name in sys.modules if name.startswith(tuple(ours))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(ConfigError, match=rf"{driver}.* is not .*pip install 'oncely\[{extra}\]'"):
        open_it(url)


# ---- Passwords ---------------------------------------------------------------------------------


def check_secret_is_kept(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that is printed of an error, or was logged before it, shows the password."""
    printed = "".join(traceback.format_exception(error))
    assert _SECRET not in printed + str(error) + repr(error) + caplog.text
    assert "\n" not in str(error)


UNREACHABLE = [
    f"postgresql://anna:{_SECRET}@127.0.0.1:{{port}}/x",
    f"postgresql://127.0.0.1:{{port}}/x?user=anna&password={_SECRET}",
    f"mysql://anna:{_SECRET}@127.0.0.1:{{port}}/x",
    f"mariadb://127.0.0.1:{{port}}/x?user=anna&password={_SECRET}",
]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_password_of_a_server_away(url: str, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is not there is told in one line, without the password."""
    ledger = open_ledger(url.format(port=free_port()))
    with pytest.raises(StoreUnavailable, match="refused") as raised:
        ledger.claim(key)
    check_secret_is_kept(raised.value, caplog)
    assert _SECRET not in repr(ledger) + repr(vars(ledger))


def test_wrong_password(mysql_url: str, key: Key, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong password is refused at once, in one line, and never shown."""
    wrong = make_url(mysql_url).set(password=_SECRET).render_as_string(hide_password=False)
    with pytest.raises(StoreError, match="Access denied") as raised:
        open_ledger(wrong).claim(key)
    assert not isinstance(raised.value, StoreUnavailable)
    check_secret_is_kept(raised.value, caplog)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://anna:{_SECRET}@host",
        f"postgresql://anna:{_SECRET}@host:port/x",
        f"postgresql://anna:{_SECRET}",
        f"postgresql://anna:a/{_SECRET}@host:port/x",
        f"mysql://anna:a@{_SECRET}@host/",
        f"postgrez://anna:{_SECRET}@host/x",
        f"postgresql://host?password={_SECRET}",
    ],
)
def test_password_in_a_wrong_url(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A URL that is refused is not shown with its password, nor one beside something else that is
    wrong.
    """
    for wrong in ({}, {"table": "a b"}, {"schema": "a b"}, {"table": 5}):
        with pytest.raises(ConfigError) as raised:
            open_ledger(url, **wrong)
        check_secret_is_kept(raised.value, caplog)
