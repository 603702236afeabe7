"""A producer, which is killed: transactions of its own in which it sends, some of them undone."""

import os
import random
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from sqlalchemy import Connection, create_engine, text
from tests.integration.relaying import DESTINATION

from oncely import Message, open_ledger
from oncely.ledger.ledger import Ledger

WORK = "CREATE TABLE work (id varchar(36) PRIMARY KEY, body text NOT NULL)"
"""What is sent with each row is to arrive if, and only if, the row is there."""
_DONE = text("INSERT INTO work (id, body) VALUES (:id, :body)")
_UNDONE = 0.3
"""Which part of all transactions is undone."""
_KEYS = 20
_MOST = 3
"""Messages in one of them."""


class _ChangeOfMind(Exception):
    """Undoes a transaction."""


def _transact(connection: Connection, ledger: Ledger) -> None:
    with ledger.transaction(connection) as inbox:
        for number in range(random.randint(1, _MOST)):
            done = {"id": str(uuid4()), "body": f"{os.getpid()}/{number}"}
            # In any order: it is one transaction.
            for step in random.sample(("work", "send"), 2):
                if step == "work":
                    connection.execute(_DONE, done)
                else:
                    key = random.choice((None, str(random.randrange(_KEYS))))
                    inbox.send(DESTINATION, Message(done["id"], done["body"].encode(), key=key))
        is_undone = random.random() < _UNDONE
        if is_undone and random.random() < 0.5:
            raise _ChangeOfMind
    if is_undone:
        raise _ChangeOfMind


def produce(url: str, tally: Path) -> None:
    """Until it is killed; `tally` has a letter for each transaction that has come to its end."""
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    ledger = open_ledger(url)
    file = os.open(tally, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        end = b"r"
        with suppress(_ChangeOfMind), engine.begin() as connection:
            _transact(connection, ledger)
            end = b"c"
        os.write(file, end)


if __name__ == "__main__":
    produce(sys.argv[1], Path(sys.argv[2]))
