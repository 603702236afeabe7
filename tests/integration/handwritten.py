"""A service written by hand around the table processed_messages. It knows nothing of oncely."""

import json
from collections.abc import Mapping
from typing import Any

import psycopg
from tests.integration.drivers import Psycopg

TABLE = """
CREATE TABLE processed_messages (
    id                  SERIAL PRIMARY KEY,
    message_id          VARCHAR(255) NOT NULL,    -- UUID from message
    provider            VARCHAR(50) NOT NULL,     -- Service identifier
    status              VARCHAR(50) NOT NULL,     -- 'processing', 'sent', 'failed'
    attempts            INT DEFAULT 1,            -- Retry counter
    first_processed_at  TIMESTAMP NOT NULL,       -- First attempt
    last_processed_at   TIMESTAMP NOT NULL,       -- Most recent attempt
    metadata            JSONB,                    -- Optional context

    CONSTRAINT uq_message_provider UNIQUE (message_id, provider)
);

-- Fast lookup for idempotency check
CREATE INDEX idx_processed_messages_lookup
ON processed_messages (message_id, provider);

-- Fast cleanup of old records
CREATE INDEX idx_processed_messages_cleanup
ON processed_messages (last_processed_at);
"""

_SELECT = """
    SELECT status
    FROM processed_messages
    WHERE message_id = %(message_id)s AND provider = %(provider)s
    LIMIT 1
"""
_SELECT_WITH_ATTEMPTS = """
    SELECT status, attempts
    FROM processed_messages
    WHERE message_id = %(message_id)s AND provider = %(provider)s
    LIMIT 1
"""
_MARK_PROCESSING = """
    INSERT INTO processed_messages (
        message_id,
        provider,
        status,
        attempts,
        metadata,
        first_processed_at,
        last_processed_at
    ) VALUES (
        %(message_id)s,
        %(provider)s,
        %(status)s,
        1,
        %(metadata)s::jsonb,
        NOW(),
        NOW()
    )
    ON CONFLICT (message_id, provider) DO UPDATE SET
        attempts = processed_messages.attempts + 1,
        last_processed_at = NOW()
    RETURNING id, attempts
"""
_MARK_SENT = """
    UPDATE processed_messages
    SET status = %(status)s, last_processed_at = NOW()
    WHERE message_id = %(message_id)s AND provider = %(provider)s
"""
_MARK_FAILED = """
    UPDATE processed_messages
    SET
        status = %(status)s,
        last_processed_at = NOW(),
        metadata = jsonb_set(
            COALESCE(metadata, '{}'::jsonb),
            '{error}',
            to_jsonb(%(error)s::text)
        )
    WHERE message_id = %(message_id)s AND provider = %(provider)s
"""
_CLEANUP = """
    DELETE FROM processed_messages
    WHERE last_processed_at < NOW() - INTERVAL '30 days'
"""


class Service:
    """Its statements are as they were written; only the placeholders are psycopg's."""

    def __init__(self, connection: Psycopg, provider: str) -> None:
        self._connection = connection
        self._provider = provider

    def status(self, message_id: str) -> str | None:
        """What it finds before it works on a message."""
        row = self._execute(_SELECT, message_id).fetchone()
        return None if row is None else str(row[0])

    def status_and_attempts(self, message_id: str) -> tuple[Any, ...] | None:
        """The same, with the number of attempts."""
        return self._execute(_SELECT_WITH_ATTEMPTS, message_id).fetchone()

    def mark_processing(
        self, message_id: str, metadata: Mapping[str, Any] | list[Any]
    ) -> tuple[int, int]:
        """The row's id, and the attempts so far: the message is its own if that is the first."""
        text = json.dumps(metadata)
        row = self._execute(
            _MARK_PROCESSING, message_id, status="processing", metadata=text
        ).fetchone()
        assert row is not None
        return row[0], row[1]

    def mark_sent(self, message_id: str) -> None:
        self._execute(_MARK_SENT, message_id, status="sent")

    def mark_failed(self, message_id: str, error: str) -> None:
        self._execute(_MARK_FAILED, message_id, status="failed", error=error)

    def cleanup(self) -> int:
        """Remove what is old; how many rows."""
        return self._connection.execute(_CLEANUP).rowcount

    def claims(self, message_id: str) -> bool:
        """What it does with each delivery: look, then mark; whether it may work on it."""
        if self.status(message_id) is not None:
            return False
        return self.mark_processing(message_id, {"to": "+49"})[1] == 1

    def _execute(
        self, statement: str, message_id: str, **values: str
    ) -> psycopg.Cursor[tuple[Any, ...]]:
        names = {"message_id": message_id, "provider": self._provider}
        return self._connection.execute(statement, {**names, **values})
