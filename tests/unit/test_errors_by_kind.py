"""Errors for people: the line that is read first, and the kind by which errors are counted."""

from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text

from oncely.core.errors import describe, traced
from oncely.core.errors_by_kind import headline, kind_of

NO_TABLE = "OperationalError: (sqlite3.OperationalError) no such table: orders"


def fail(message: str) -> None:
    """A statement that no database takes, with a parameter."""
    engine = create_engine("sqlite://")
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT * FROM orders WHERE id = :id"), {"id": message})
    finally:
        # Its only connection stays open else, of which Python 3.13 warns in some later test.
        engine.dispose()


def chained() -> None:
    """An error of which another one is the cause."""
    try:
        fail("order-1")
    except Exception as error:
        raise ValueError("order-1 is not stored\nsee the log") from error


def grouped() -> None:
    """An error within a group, whose frames have a margin."""
    try:
        fail("order-1")
    except Exception as error:  # noqa: BLE001 - a user's handler may do so.
        raise ExceptionGroup("two tasks", [OSError("away"), error]) from None


@pytest.mark.parametrize(
    ("raises", "line"),
    [
        (
            lambda: fail("order-1"),
            "OperationalError: (sqlite3.OperationalError) no such table: orders",
        ),
        (chained, "ValueError: order-1 is not stored"),
        (grouped, NO_TABLE),
    ],
)
def test_headline_of_what_was_raised(raises: Callable[[], None], line: str) -> None:
    """The class and the first line of the text: not frames, statement, parameters, or a link; also
    where the traceback has lost its beginning.
    """
    with pytest.raises(Exception) as raised:  # noqa: PT011
        raises()
    traceback = traced(raised.value)
    assert "Traceback" in traceback
    for told in (traceback, traceback[-700:], f"{traceback}\n"):
        assert headline(told).removeprefix("sqlalchemy.exc.") == line
    if raises is not grouped:
        assert headline(describe(raised.value)) == line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("", ""),
        ("E: no (Background on this error at: https://sqlalche.me/e/20/3o7r)", "E: no"),
        ('E: \n  See:\nTraceback:\n  File "x", line 3, in f\n    g()\nKeyError: 7', "KeyError: 7"),
        ("E: o9.save.\n: org.Spark: Job aborted\n\tat org", "E: o9.save: org.Spark: Job aborted"),
    ],
)
def test_headline_of_a_text(error: str, line: str) -> None:
    """What SQLAlchemy adds to its own errors is left out; Java's class and text come together."""
    assert headline(error) == line


@pytest.mark.parametrize(
    ("reason", "common"),
    [
        ("ValueError: no customer 17", "ValueError: no customer <n>"),
        ("KeyError: 'order-18'", "KeyError: <text>"),
        ('E: no "a b"', "E: no <text>"),
        ("E: order-17 for user_42", "E: <id> for <id>"),
        ("E: 123e4567-e89b-12d3-a456-426614174000 is gone", "E: <id> is gone"),
        ("E: <Shop at 0x7f3a91> deadbeef12", "E: <Shop at <hex>> <hex>"),
        ("E: https://a.example/orders?id=1 is down", "E: <url> is down"),
        ("E: ann@example.org at 10.0.0.1:5432", "E: <address> at <address>"),
        ("E: since 2026-11-24T08:40:27.5+00:00, 3.5 s", "E: since <time>, <n> s"),
        ("E: can't read the user's file", "E: can't read the user's file"),
        ("E: first\nsecond 7", "E: first"),
        ('E: no "a"\n[SQL: SELECT 1]\n[parameters: (7,)]', "E: no <text>"),
        ("", ""),
    ],
)
def test_kind_of(reason: str, common: str) -> None:
    """What varies from one message to the next tells no group from another; all else does."""
    assert kind_of(reason) == common
