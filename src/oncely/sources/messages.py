"""Messages as their brokers have them, and errors of the brokers' drivers."""

import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from oncely.core.errors import TransportError, describe
from oncely.core.message import Message
from oncely.sources import without_id

_FIELDS = {"type": "type", "source": "source", "content-type": "content_type", "key": "key"}
"""Fields of a message, by the headers that hold them."""
_LOST = "\ufffd"
"""In place of what is not UTF-8: ids that differ may look the same then."""


@contextmanager
def transport_errors(*kinds: type[Exception]) -> Iterator[None]:
    """In this block, errors of a driver become TransportErrors."""
    try:
        yield
    except kinds as error:
        raise TransportError(describe(error)) from error


def nats_message(raw: Any) -> Message:
    """The message of a nats.aio.msg.Msg."""
    at, headers = raw.metadata, {"type": raw.subject, **(raw.headers or {})}
    # A stream that is made again has the same numbers.
    given_id = f"{at.stream}:{at.sequence.stream}:{at.timestamp.isoformat()}"
    return _read(headers.pop("Nats-Msg-Id", given_id), raw.data, headers, time=at.timestamp)


def sqs_message(raw: Mapping[str, Any]) -> Message:
    """The message of one that boto3 has received."""
    system, body = raw["Attributes"], raw["Body"].encode()
    group, own_id = system.get("MessageGroupId"), system.get("MessageDeduplicationId")
    headers = {
        name: value.get("StringValue") or b64encode(value.get("BinaryValue", b"")).decode()
        for name, value in raw.get("MessageAttributes", {}).items()
    }
    # A hash of the body is the same for other messages. Groups may have ids of their own.
    is_own = own_id and own_id != sha256(body).hexdigest()
    given_id = f"{group}/{own_id}" if is_own else raw["MessageId"]
    time = datetime.fromtimestamp(int(system["SentTimestamp"]) / 1_000, UTC)
    return _read(given_id, body, headers, time=time, key=group)


def redis_message(stream: str, entry_id: str, raw: Mapping[bytes, bytes]) -> Message:
    """The message of an entry's fields."""
    fields = {n.decode(errors="replace"): v.decode(errors="replace") for n, v in raw.items()}
    body, time = raw.get(b"body", json.dumps(fields).encode()), None
    with suppress(ValueError, OverflowError, OSError):
        time = datetime.fromtimestamp(int(entry_id.partition("-")[0]) / 1_000, UTC)
    is_text = b"body" in raw or _LOST not in str(fields)
    fields.pop("body", None)
    message = _read(fields.pop("id", "") or f"{stream}:{entry_id}", body, fields, time=time)
    return message if is_text else without_id(message, "a field is not UTF-8")


def _read(given_id: str, body: bytes, headers: Mapping[str, str], **known: Any) -> Message:
    """What the sender has written into headers comes before what is known otherwise."""
    rest = dict(headers)
    said = {name: rest.pop(header) for header, name in _FIELDS.items() if header in rest}
    id_ = rest.pop("message-id", "") or given_id
    message = Message(id_, body, headers=rest, **(known | said))
    return without_id(message, "the message id is not UTF-8") if _LOST in id_ else message
