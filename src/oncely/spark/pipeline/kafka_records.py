"""A record of Spark's Kafka source as the message that the transport `kafka://` would receive.

Both read it by the same function, so that the ledger knows what either of them has handled.
"""

import sys
from collections.abc import Sequence
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as f

from oncely.core.message import Message
from oncely.transports.kafka.records import BAD_NAME, Record, message_of

_FIELDS = (
    "id string, type string, body binary, headers map<string, string>, source string, "
    "time string, key string, problem string"
)
_NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
"""What Java's client puts in the place of bytes of a name that are not UTF-8."""


def message_of_record() -> Column:
    """A struct of the message and of its problem, if it cannot be handled."""
    read = f.udf(_read, _FIELDS, useArrow=False)
    return read("value", "key", "headers", f.unix_millis("timestamp"))


def _read(
    value: bytes | None,
    key: bytes | None,
    headers: Sequence[tuple[str, bytes | None]] | None,
    timestamp_ms: int,
) -> tuple[Any, ...]:
    headers = headers or ()
    is_bad = any(_NOT_UTF8 in name for name, _ in headers)
    problem = BAD_NAME if is_bad else None
    record = Record(value, key, () if is_bad else headers, problem, timestamp_ms)
    # What is too large is a matter of the topic alone.
    message, problem = message_of(record, "", sys.maxsize)
    others = dict(message.headers)
    if message.content_type != Message("").content_type:
        # Rows of messages have no column for it.
        others["content-type"] = message.content_type
    time = message.time and message.time.isoformat()
    source, body = message.source, message.body
    return message.id, message.type, body, others, source, time, message.key, problem
