"""A program with a business table, and its ways to process a message in a transaction."""

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, create_engine, make_url, text

import oncely
from loads import Process
from oncely import Granted, Key, open_ledger

CONNECTIONS = 8
CONSUMER = "bench"

ProcessWindow = Callable[[Sequence[str]], None]

_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_KINDS = {
    "postgresql": ("BIGSERIAL PRIMARY KEY", "text"),
    "mysql": ("BIGINT AUTO_INCREMENT PRIMARY KEY", "VARCHAR(255)"),
}
_BY_HAND = {
    "postgresql": "INSERT INTO by_hand VALUES (%s, %s) ON CONFLICT DO NOTHING",
    "mysql": "INSERT IGNORE INTO by_hand VALUES (%s, %s)",
}
_ORDER = "INSERT INTO orders (content) VALUES (%s)"
_INSERT = text("INSERT INTO orders (content) VALUES (:content)")


class Shop:
    """Processing a message means inserting a row. Each way is made once for a thread."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._kind = self._url.get_backend_name()
        driver = self._url.set(drivername=_DRIVERS[self._kind])
        self.engine = create_engine(driver, pool_size=CONNECTIONS)
        self.plain = create_engine(driver, pool_size=CONNECTIONS)
        """An engine that no ledger has ever seen."""
        self.ledger = open_ledger(url)

    def prepare(self) -> None:
        """Create its tables, without rows."""
        key, text_type = _KINDS[self._kind]
        self.ledger.migrate()
        with self.engine.begin() as connection:
            for statement in (
                f"CREATE TABLE orders (id {key}, content {text_type})",
                f"""CREATE TABLE by_hand (consumer {text_type}, message_id {text_type},
                PRIMARY KEY (message_id, consumer))""",
            ):
                connection.execute(text(statement))

    def clear(self) -> None:
        """Remove all rows."""
        tables = ("orders", "by_hand", "processed_messages")
        with self.engine.begin() as connection:
            for table in tables:
                connection.execute(text(f"TRUNCATE TABLE {table}"))

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()
        self.plain.dispose()
        self.ledger.close()

    # ---- One message after the other -----------------------------------------------------------

    def alone(self) -> Process:
        """The business insert; duplicates are not detected."""

        def process(message_id: str) -> None:
            with self.plain.begin() as connection:
                connection.execute(_INSERT, {"content": message_id})

        return process

    def claimed(self) -> Process:
        """A claim and its completion in the same transaction."""

        def process(message_id: str) -> None:
            with (
                self.engine.begin() as connection,
                self.ledger.transaction(connection) as inbox,
            ):
                outcome = inbox.claim(Key(CONSUMER, message_id))
                if isinstance(outcome, Granted):
                    connection.execute(_INSERT, {"content": message_id})
                    inbox.complete(outcome.claim)

        return process

    def decorated(self) -> Process:
        """`once`, which does the same around a function."""

        @oncely.once(self.ledger, consumer=CONSUMER, key=str, transaction=self.engine)
        def process(message_id: str, connection: Connection) -> None:
            connection.execute(_INSERT, {"content": message_id})

        return process

    def by_hand_alone(self) -> Process:
        """The business insert with the driver alone."""
        raw = self._connected()
        cursor = raw.cursor()

        def process(message_id: str) -> None:
            cursor.execute(_ORDER, (message_id,))
            raw.commit()

        return process

    def by_hand(self) -> Process:
        """The same after a bare claim, in a table with only the key."""
        raw = self._connected()
        cursor, claim = raw.cursor(), _BY_HAND[self._kind]

        def process(message_id: str) -> None:
            cursor.execute(claim, (CONSUMER, message_id))
            if cursor.rowcount:
                cursor.execute(_ORDER, (message_id,))
            raw.commit()

        return process

    def _connected(self) -> Any:
        """A connection of the driver, without SQLAlchemy."""
        pooled = self.plain.raw_connection()
        pooled.detach()
        return pooled.dbapi_connection

    # ---- In windows ----------------------------------------------------------------------------

    def window_alone(self) -> ProcessWindow:
        """The business inserts of all messages in one transaction."""

        def process(ids: Sequence[str]) -> None:
            with self.plain.begin() as connection:
                connection.execute(_INSERT, [{"content": message_id} for message_id in ids])

        return process

    def window_claimed(self) -> ProcessWindow:
        """The same with their claims and completions."""

        def process(ids: Sequence[str]) -> None:
            with (
                self.engine.begin() as connection,
                self.ledger.transaction(connection) as inbox,
            ):
                outcomes = inbox.claim_many([Key(CONSUMER, message_id) for message_id in ids])
                claims = [o.claim for o in outcomes if isinstance(o, Granted)]
                rows = [{"content": claim.key.message_id} for claim in claims]
                connection.execute(_INSERT, rows)
                inbox.complete_many(claims)

        return process
