"""Handlers that run in Spark's Python workers: each effect says which message, fence and try."""

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from sqlalchemy import text
from sqlalchemy.orm import Session

import oncely

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG_VARIABLE = "ONCELY_TEST_EFFECTS"
"""The environment variable that says where the log is; the name of the consumer follows."""
DATABASE_VARIABLE = "ONCELY_TEST_DATABASE"
"""The environment variable that says where a batch handler writes."""
BEGUN = "begun"
"""The file beside the logs that is there once a driver has begun all of its streams."""
_POLL_S = 0.02
_LONGEST_S = 0.01
"""What a handler takes, before and after its effect."""
_EFFECT = text(
    "INSERT INTO transactional (message_id, fence, attempt, pid) VALUES (:id, :fence, :n, :p)"
)


def append(message: oncely.Message) -> None:
    """An effect outside: one line in the log, written with one call."""
    claim = oncely.current().claim
    _wait_for_all()
    _take_time()
    line = f"{message.id} {claim.fence} {claim.attempts} {os.getpid()}\n"
    file = os.open(
        os.environ[LOG_VARIABLE] + claim.key.consumer, os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    _take_time()


def insert(message: oncely.Message, session: Session) -> None:
    """An effect in the ledger's own database."""
    claim = oncely.current().claim
    _wait_for_all()
    _take_time()
    values = {"id": message.id, "fence": claim.fence, "n": claim.attempts, "p": os.getpid()}
    session.execute(_EFFECT, values)
    _take_time()


def insert_batch(messages: "DataFrame", batch_key: str) -> None:
    """An effect in a database, in a transaction of its own."""
    _wait_for_all()
    rows = [(row.id, batch_key) for row in messages.select("id").collect()]
    with psycopg.connect(os.environ[DATABASE_VARIABLE]) as connection:
        connection.cursor().executemany("INSERT INTO batches VALUES (%s, 1, %s)", rows)
        _take_time()
    _take_time()


def asked(batch_key: str) -> str:
    try:
        with psycopg.connect(os.environ[DATABASE_VARIABLE]) as connection:
            found = connection.execute(
                "SELECT 1 FROM batches WHERE batch_key = %s LIMIT 1", [batch_key]
            ).fetchone()
    except psycopg.Error:
        return "unknown"
    return "happened" if found else "not_happened"


def _wait_for_all() -> None:
    """Streams begin one by one: no strike is to come before the last has begun."""
    begun = Path(os.environ[LOG_VARIABLE]).with_name(BEGUN)
    while not begun.exists():
        time.sleep(_POLL_S)


def _take_time() -> None:
    time.sleep(random.uniform(0, _LONGEST_S))
