"""What teams write by hand: look, insert or count, mark, each committed."""

import sqlite3
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from sqlalchemy import make_url

from loads import Process

_SELECT = "SELECT status FROM hand_written WHERE message_id = {0} AND provider = {0} LIMIT 1"
_MARK = (
    "UPDATE hand_written SET status = {0}, last_processed_at = {1}"
    " WHERE message_id = {0} AND provider = {0}"
)
_INDEXES = (
    "CREATE INDEX idx_hand_written_lookup ON hand_written (message_id, provider)",
    "CREATE INDEX idx_hand_written_cleanup ON hand_written (last_processed_at)",
)


class HandWritten(ABC):
    """The hand-written flow on one kind of store."""

    @abstractmethod
    def prepare(self, rows: int) -> None:
        """Create its table again, with so many rows in it."""

    @abstractmethod
    def connect(self) -> Process:
        """A connection of its own, which processes messages by their id."""


class Postgresql(HandWritten):
    """Three statements for each message."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection = self._connected()

    def _connected(self) -> Any:
        import psycopg

        return psycopg.connect(self._url, autocommit=True)

    def prepare(self, rows: int) -> None:
        for statement in (
            "DROP TABLE IF EXISTS hand_written",
            """CREATE TABLE hand_written (id SERIAL PRIMARY KEY, message_id VARCHAR(255) NOT NULL,
            provider VARCHAR(50) NOT NULL, status VARCHAR(50) NOT NULL DEFAULT 'processing',
            attempts INT DEFAULT 1, first_processed_at TIMESTAMP NOT NULL DEFAULT NOW(),
            last_processed_at TIMESTAMP NOT NULL DEFAULT NOW(), metadata JSONB,
            CONSTRAINT uq_hand_written UNIQUE (message_id, provider))""",
            *_INDEXES,
            f"""INSERT INTO hand_written (message_id, provider, status, metadata)
            SELECT gen_random_uuid(), 'bench', 'sent', '{{}}' FROM generate_series(1, {rows})""",
        ):
            self._connection.execute(statement)

    def connect(self) -> Process:
        cursor = self._connected().cursor()
        select, mark = _SELECT.format("%s"), _MARK.format("%s", "NOW()")
        upsert = """INSERT INTO hand_written (message_id, provider, status, attempts, metadata,
            first_processed_at, last_processed_at)
            VALUES (%s, 'bench', 'processing', 1, '{}', NOW(), NOW())
            ON CONFLICT (message_id, provider) DO UPDATE SET attempts = hand_written.attempts + 1,
            last_processed_at = NOW() RETURNING id, attempts"""

        def process(message_id: str) -> None:
            if cursor.execute(select, (message_id, "bench")).fetchone():
                return
            if cursor.execute(upsert, (message_id,)).fetchone()[1] == 1:
                cursor.execute(mark, ("sent", message_id, "bench"))

        return process


class MariaDb(HandWritten):
    """The same in MariaDB's SQL."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._cursor = self._connected().cursor()

    def _connected(self) -> Any:
        import pymysql

        at = self._url
        return pymysql.connect(
            host=at.host or "127.0.0.1",
            port=at.port or 3306,
            user=at.username,
            password=at.password or "",
            database=at.database,
            autocommit=True,
        )

    def prepare(self, rows: int) -> None:
        for statement in (
            "DROP TABLE IF EXISTS hand_written",
            """CREATE TABLE hand_written (id INT AUTO_INCREMENT PRIMARY KEY,
            message_id VARCHAR(255) NOT NULL, provider VARCHAR(50) NOT NULL,
            status VARCHAR(50) NOT NULL DEFAULT 'processing',
            attempts INT DEFAULT 1, first_processed_at DATETIME NOT NULL DEFAULT NOW(),
            last_processed_at DATETIME NOT NULL DEFAULT NOW(), metadata JSON,
            CONSTRAINT uq_hand_written UNIQUE (message_id, provider))""",
            *_INDEXES,
        ):
            self._cursor.execute(statement)
        if rows:
            sequence = f"SELECT 'bench', UUID() FROM seq_1_to_{rows}"
            self._cursor.execute(f"INSERT INTO hand_written (provider, message_id) {sequence}")

    def connect(self) -> Process:
        cursor = self._connected().cursor()
        select, mark = _SELECT.format("%s"), _MARK.format("%s", "NOW()")
        upsert = """INSERT INTO hand_written (message_id, provider, status, metadata)
            VALUES (%s, 'bench', 'processing', '{}') ON DUPLICATE KEY UPDATE
            attempts = attempts + 1, last_processed_at = NOW()"""

        def process(message_id: str) -> None:
            cursor.execute(select, (message_id, "bench"))
            if cursor.fetchone():
                return
            if cursor.execute(upsert, (message_id,)) == 1:
                cursor.execute(mark, ("sent", message_id, "bench"))

        return process


class Sqlite(HandWritten):
    """The same in a SQLite file, as durable as the ledger's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._connection = self._connected()
        self._lock = threading.Lock()

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._file, 30, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        return connection

    def prepare(self, rows: int) -> None:
        for statement in (
            "DROP TABLE IF EXISTS hand_written",
            """CREATE TABLE hand_written (id INTEGER PRIMARY KEY, message_id TEXT NOT NULL,
            provider TEXT NOT NULL, status TEXT NOT NULL, attempts INT DEFAULT 1,
            first_processed_at DEFAULT CURRENT_TIMESTAMP,
            last_processed_at DEFAULT CURRENT_TIMESTAMP, metadata TEXT,
            UNIQUE (message_id, provider))""",
            *_INDEXES,
        ):
            self._connection.execute(statement)
        self._connection.execute(
            f"""WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n LIMIT {rows})
            INSERT INTO hand_written (provider, message_id, status)
            SELECT 'bench', hex(randomblob(16)), 'sent' FROM n WHERE {rows} > 0"""
        )

    def connect(self) -> Process:
        connection = self._connected()
        select, mark = _SELECT.format("?"), _MARK.format("?", "CURRENT_TIMESTAMP")
        upsert = """INSERT INTO hand_written (message_id, provider, status, metadata)
            VALUES (?, 'bench', 'processing', '{}') ON CONFLICT DO UPDATE SET
            attempts = attempts + 1, last_processed_at = CURRENT_TIMESTAMP RETURNING attempts"""

        def process(message_id: str) -> None:
            if connection.execute(select, (message_id, "bench")).fetchone():
                return
            if connection.execute(upsert, (message_id,)).fetchall()[0][0] == 1:
                connection.execute(mark, ("sent", message_id, "bench"))

        return process


class Redis(HandWritten):
    """SET NX, and SET when done."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = self._connected()

    def _connected(self) -> Any:
        import redis

        return redis.Redis.from_url(self._url)

    def prepare(self, rows: int) -> None:
        self._client.flushdb()
        for start in range(0, rows, 10_000):
            pipeline = self._client.pipeline(transaction=False)
            for n in range(start, min(start + 10_000, rows)):
                pipeline.set(f"by-hand:bench:before-{n}", "sent", ex=86_400)
            pipeline.execute()

    def connect(self) -> Process:
        client = self._connected()

        def process(message_id: str) -> None:
            name = f"by-hand:bench:{message_id}"
            if client.set(name, "processing", nx=True, ex=86_400):
                client.set(name, "sent", ex=86_400)

        return process
