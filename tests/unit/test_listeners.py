"""Listeners of SQLAlchemy that a program has for every engine: the ledger's has them, too."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from oncely import Busy, Granted, Key, open_ledger

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
