"""`transaction=` on another database than the ledger's is refused where it is written."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from oncely import Consumer, open_ledger
from oncely.adapters.celery import once_task
from oncely.adapters.dramatiq import OnceMiddleware
from oncely.adapters.faststream import once_middleware
from oncely.adapters.pika import once_callback
from oncely.core.errors import ConfigError
from oncely.once import once

Use = Callable[[Any, Any], object]
"""Makes something over a ledger, with a source of transactions."""

_DRIVERS = {"sqlite": "aiosqlite", "postgresql": "psycopg", "mysql": "asyncmy"}


def _handle(message: Any, session: Any) -> None: ...


def _once(ledger: Any, source: Any) -> object:
    decorate: Any = once(ledger, consumer="c", key=lambda *_: "1", transaction=source)
    return decorate(_handle)


def _consumer(ledger: Any, source: Any) -> object:
    consumer = Consumer("memory://elsewhere", "in").idempotent(ledger, "c").transactional(source)
    consumer.stop()
    return consumer.consume(_handle)


def _faststream(ledger: Any, source: Any) -> object:
    engine = source.kw["bind"] if isinstance(source, sessionmaker) else source
    kind = engine.url.get_backend_name()
    url = engine.url.set(drivername=f"{kind}+{_DRIVERS[kind]}")
    made: AsyncEngine = create_async_engine(url)
    is_factory = isinstance(source, sessionmaker)
    return once_middleware(
        ledger, "c", transaction=async_sessionmaker(made) if is_factory else made
    )


USES: list[Use] = [
    _once,
    _consumer,
    lambda ledger, source: once_callback(ledger, "c", _handle, transaction=source),
    lambda ledger, source: once_task(ledger, transaction=source),
    lambda ledger, source: OnceMiddleware(ledger, transaction=source),
    _faststream,
]
every = pytest.mark.parametrize(
    "use", USES, ids=["once", "Consumer", "pika", "celery", "dramatiq", "faststream"]
)


@every
def test_another_database(use: Use, tmp_path: Path) -> None:
    """It is one line, which names both and says what to type instead; so is what is in memory."""
    file = tmp_path / "ledger.db"
    with closing(open_ledger(f"sqlite:///{file}")) as ledger:
        ledger.migrate()
        other = create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
        server = create_engine("postgresql+psycopg://me:secret@h/shop")
        for source in (other, sessionmaker(other)):
            with pytest.raises(
                ConfigError, match=r"shop\.db', and the ledger is in '\S+ledger\.db'"
            ):
                use(ledger, source)
        for source in (server, sessionmaker(server)):
            with pytest.raises(
                ConfigError, match="to postgresql, and the ledger is in sqlite"
            ) as e:
                use(ledger, source)
            assert str(e.value).endswith("on the same database, as in open_ledger(engine)")
            assert "secret" not in str(e.value)
        use(ledger, create_engine(f"sqlite:///{tmp_path}/../{tmp_path.name}/ledger.db"))
        use(ledger, sessionmaker(create_engine(f"sqlite:///{file}")))
    with pytest.raises(ConfigError, match="a ledger in memory cannot be part of"):
        use(open_ledger("memory://"), other)


@pytest.mark.parametrize(
    ("ledger", "source", "said"),
    [
        ("postgresql://a@h/shop", "postgresql+psycopg2://b@pooler:6432/shop", None),
        ("postgresql://a@h/shop", "postgresql+psycopg://a@h/stock", "to 'stock', and the ledger"),
        ("postgresql://a@h/shop", "postgresql+psycopg://", None),
        ("postgresql://a@h/shop", "mysql+pymysql://a@h/shop", "to mysql, and the ledger is in po"),
        ("mysql://a@h/shop", "mariadb+pymysql://a@h/shop", None),
        ("mysql://a@h/shop", "mysql+pymysql://a@h/stock", "to 'stock', and the ledger is in 'sho"),
    ],
)
def test_on_servers(ledger: str, source: str, said: str | None) -> None:
    """What counts is the name of the database: a server has several addresses."""
    with closing(open_ledger(ledger)) as opened:
        engine = create_engine(make_url(source))
        if said is None:
            _once(opened, engine)
            return
        with pytest.raises(ConfigError, match=said):
            _once(opened, engine)


def test_what_reaches_every_database() -> None:
    """A ledger in a schema of MariaDB, which is a database, is reached from any other one."""
    with closing(open_ledger("mysql://a@h/shop", schema="ledgers")) as ledger:
        _once(ledger, create_engine("mysql+pymysql://a@h/stock"))


def test_what_cannot_be_told(tmp_path: Path) -> None:
    """What begins transactions in a way of its own, or has no engine yet, is taken."""

    class Own:
        def begin(self) -> None: ...

    with closing(open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}")) as ledger:
        for source in (Own(), sessionmaker(), create_engine("sqlite://")):
            _once(ledger, source)
