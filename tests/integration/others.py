"""Another program on the same database: it locks rows, and ends sessions."""

from typing import Any

import pymysql
from tests.conditions import wait_until
from tests.integration.drivers import Psycopg, PyMysql, rows_of

from oncely.core.record import Key


class Other:
    """What another program does beside the ledger."""

    kind: str
    sessions: str
    """The sessions in the same database, but for its own."""
    waiting: str
    """How many of them wait for a lock."""

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """What a statement returns."""
        raise NotImplementedError

    def end(self, session: int) -> None:
        """End a session, whatever it is doing."""
        raise NotImplementedError

    def lock(self, key: Key) -> None:
        """Lock a row, in a transaction that begins here if there is none."""
        self.run("SELECT id FROM processed_messages WHERE message_id = %s FOR UPDATE", key[1])

    def await_waiters(self, count: int = 1) -> None:
        """Return once so many wait for what this program has locked."""
        # MariaDB looks anew only where it was not asked for a tenth of a second.
        wait_until(lambda: self.run(self.waiting)[0][0] >= count, pause_s=0.12)

    def end_one(self) -> int:
        """End one session of the others; how many were ended."""
        found = self.run(self.sessions)
        for (session,) in found[:1]:
            self.end(session)
        return len(found[:1])


class OtherOnPostgresql(Other):
    """Another program's connection to a PostgreSQL."""

    kind = "postgresql"
    sessions = (
        "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY random()"
    )
    waiting = (
        "SELECT count(*) FROM pg_locks"
        " WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid))"
    )

    def __init__(self, connection: Psycopg) -> None:
        self._connection = connection

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement.encode(), values or None)
        return cursor.fetchall() if cursor.description else []

    def end(self, session: int) -> None:
        self.run("SELECT pg_terminate_backend(%s)", session)


class OtherOnMysql(Other):
    """Another program's connection to a MariaDB."""

    kind = "mysql"
    sessions = (
        "SELECT id FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID() ORDER BY rand()"
    )
    waiting = (
        "SELECT count(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        " AND trx_mysql_thread_id IN"
        " (SELECT id FROM information_schema.processlist WHERE db = DATABASE())"
    )

    def __init__(self, connection: PyMysql) -> None:
        self._connection = connection

    def run(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        return list(rows_of(self._connection, statement, *values))

    def end(self, session: int) -> None:
        try:
            self.run("KILL %s", session)
        except pymysql.OperationalError as error:
            if error.args[0] != pymysql.constants.ER.NO_SUCH_THREAD:
                raise
