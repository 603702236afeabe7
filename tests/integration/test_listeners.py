"""Listeners of SQLAlchemy that a program has for every engine: the ledger's has them, too."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from oncely import Busy, Granted, Key, Written, open_ledger

KEYS = [Key("billing", message_id) for message_id in ("1", "2", "3")]


@contextmanager
def listening(listener: Callable[[Any, object], None]) -> Iterator[None]:
    """Inside the block, each new connection of every engine is shown to `listener`."""
    event.listen(Engine, "connect", listener)
    try:
        yield
    finally:
        event.remove(Engine, "connect", listener)


def text_as_bytes(connection: Any, _: object) -> None:
    """A connection to SQLite gives text as bytes."""
    connection.text_factory = bytes


def test_other_text_for_every_engine(tmp_path: Path) -> None:
    """The ledger reads text as ever."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with listening(text_as_bytes), closing(open_ledger(url)) as ledger:
        ledger.migrate()
        for answer in (Granted, Busy):
            assert [type(outcome) for outcome in ledger.claim_many(KEYS)] == [answer] * 3


def limit(connection: Any, _: object) -> None:
    """A connection to MariaDB or MySQL reads one row, and changes only rows of keys."""
    with connection.cursor() as cursor:
        cursor.execute("SET sql_select_limit = 1, sql_safe_updates = 1")


def test_limits_for_every_engine(mysql_ledger_url: str) -> None:
    """The ledger sees all its records, and changes them."""
    with listening(limit), closing(open_ledger(mysql_ledger_url)) as ledger:
        granted = ledger.claim_many(KEYS)
        assert [type(outcome) for outcome in granted] == [Granted] * 3
        assert [type(outcome) for outcome in ledger.claim_many(KEYS)] == [Busy] * 3
        claims = [outcome.claim for outcome in granted if isinstance(outcome, Granted)]
        assert [type(outcome) for outcome in ledger.complete_many(claims)] == [Written] * 3


def show_one_digit(connection: Any, _: object) -> None:
    """A connection to PostgreSQL shows numbers with one digit."""
    with connection.cursor() as cursor:
        cursor.execute("SET extra_float_digits = -15")
    connection.commit()


def test_rounding_for_every_engine(postgresql_ledger_url: str) -> None:
    """No lease seems to be over."""
    with listening(show_one_digit), closing(open_ledger(postgresql_ledger_url)) as ledger:
        assert isinstance(ledger.claim(KEYS[0]), Granted)
        assert isinstance(ledger.claim(KEYS[0]), Busy)
