"""Listeners of SQLAlchemy that a program has for every engine: the ledger's has them, too."""

from contextlib import closing
from typing import Any

from tests.unit.test_listeners import KEYS, listening

from oncely import Busy, Granted, Written, open_ledger


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
