"""Marks: how a form names records and waiting messages."""

import json

from oncely.core.errors import ConfigError
from oncely.core.record import Key, Record

_UNUSABLE = (ValueError, TypeError, OverflowError, RecursionError)
"""What JSON raises of others, and what it gives where we expect names and a number."""


def record_mark(record: Record) -> str:
    """A record as it was when it was shown."""
    return json.dumps([*record.key, record.version])


def read_record_mark(text: str) -> tuple[Key, int]:
    """The key and the version. Raises ConfigError for what is not such a mark."""
    try:
        consumer, message_id, version = json.loads(text)
        return Key(str(consumer), str(message_id)), int(version)
    except _UNUSABLE:
        raise ConfigError("record: what the form names is not a record") from None


def waiting_mark(key: Key) -> str:
    """A message that waits for its retry."""
    return json.dumps([*key])


def read_waiting_mark(text: str) -> Key:
    """The key. Raises ConfigError for what is not such a mark."""
    try:
        consumer, message_id = json.loads(text)
        return Key(str(consumer), str(message_id))
    except _UNUSABLE:
        raise ConfigError("record: what the form names is not a waiting message") from None
