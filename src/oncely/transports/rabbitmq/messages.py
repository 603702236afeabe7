"""Between messages and what AMQP has for them: properties, headers, a body."""

import json
from datetime import UTC, datetime
from hashlib import blake2b
from math import ceil
from time import time
from typing import Any, NamedTuple

from pika import BasicProperties, DeliveryMode
from pika.exceptions import AMQPError

from oncely.core.errors import MessageError
from oncely.core.message import Message

_OURS = "x-oncely-"
"""How names of headers begin that are for oncely only, and never part of a message."""
_ID = f"{_OURS}id"
_TYPE = f"{_OURS}type"
_SOURCE = f"{_OURS}source"
_CONTENT_TYPE = f"{_OURS}content-type"
_TIME = f"{_OURS}time"
_KEY = f"{_OURS}key"
_COUNT = f"{_OURS}count"
_LETTER = f"{_OURS}letter"
_QUEUE = f"{_OURS}queue"
_REASON = f"{_OURS}reason"
_DUE = f"{_OURS}due"
_DELAY = f"{_OURS}delay"
_SET_ASIDE = (_COUNT, _LETTER, _QUEUE, _REASON, _DUE, _DELAY)
_BROKERS = ("x-delivery-count", "x-death", "x-first-death-", "x-last-death-")
"""How names of headers begin that the broker writes, about what it did."""
_CARRIED = {"CC": f"{_OURS}cc", "BCC": f"{_OURS}bcc"}
"""The broker would send copies to the queues that stand there, and closes the channel where it
cannot read them."""
_RESTORED = {ours: name for name, ours in _CARRIED.items()}
_SHORT = 255
"""Bytes; AMQP has no more room in a property."""
_MAX_PROPERTIES = 100_000
"""Bytes. They have to be in one frame, and a frame that is too large ends the connection."""


class Content(NamedTuple):
    """What is published."""

    properties: BasicProperties
    body: bytes


class Letter(NamedTuple):
    """What stands on a dead letter, besides its message."""

    id: str
    """By which it is found again."""
    queue: str
    reason: str
    times: int
    """How often it was delivered."""


def content_of(message: Message) -> Content:
    """A message as it is published. Raises MessageError for what AMQP has no room for."""
    if name := next((name for name in message.headers if name.lower().startswith(_OURS)), None):
        raise MessageError(f"header {name!r}: names that begin with {_OURS} are for oncely only")
    headers: dict[str, Any] = {_CARRIED.get(n, n): value for n, value in message.headers.items()}
    properties = BasicProperties(
        message_id=_short(message.id, _ID, headers),
        type=_short(message.type, _TYPE, headers),
        app_id=_short(message.source, _SOURCE, headers),
        content_type=_short(message.content_type, _CONTENT_TYPE, headers),
        delivery_mode=DeliveryMode.Persistent.value,
    )
    if message.key is not None:
        headers[_KEY] = message.key
    if message.time is not None:
        headers[_TIME] = message.time.isoformat()
        properties.timestamp = _seconds(message.time)
    properties.headers = headers
    _check(properties)
    return Content(properties, message.body)


def message_of(properties: BasicProperties, body: bytes) -> Message:
    """The message, whoever has published it. What cannot be understood of it is left out."""
    headers = _headers_of(properties)
    return Message(
        _text(headers.get(_ID, properties.message_id)) or "",
        body,
        _text(headers.get(_TYPE, properties.type)) or "",
        {_RESTORED.get(n, n): _text(value) or "" for n, value in headers.items() if _is_users(n)}
        if headers
        else {},
        _text(headers.get(_SOURCE, properties.app_id)) or "",
        _time_of(headers.get(_TIME), properties.timestamp),
        _content_type_of(headers.get(_CONTENT_TYPE, properties.content_type)),
        _text(headers.get(_KEY)),
    )


def count_of(properties: BasicProperties, redelivered: bool) -> int:
    """How often it was delivered, this time included, as far as the broker tells."""
    headers = properties.headers or {}
    # On a first delivery that header can only be the publisher's.
    counted = _whole(headers.get("x-delivery-count")) if redelivered else 0
    return _whole(headers.get(_COUNT)) + counted + 1


def delayed(content: Content, count: int, delay_s: float) -> Content:
    """To be delivered again after so long, as one that was delivered so often."""
    due_ms, delay_ms = ceil((time() + delay_s) * 1_000), ceil(delay_s * 1_000)
    return _with(content, {_COUNT: count, _DUE: due_ms, _DELAY: delay_ms})


def delay_of(properties: BasicProperties) -> float:
    """For how many seconds it is still delayed: for no more than what was asked, if it was delayed
    by another clock.
    """
    headers = properties.headers or {}
    due_ms, delay_ms = _whole(headers.get(_DUE)), _whole(headers.get(_DELAY))
    return max(0.0, min(due_ms / 1_000 - time(), delay_ms / 1_000))


def dead(content: Content, letter: Letter) -> Content:
    """A dead letter."""
    written: dict[str, Any] = {_COUNT: letter.times, _LETTER: letter.id, _QUEUE: letter.queue}
    return _with(content, written | {_REASON: letter.reason})


def anew(content: Content) -> Content:
    """What was a dead letter, as it was first published."""
    return _with(content, {})


def letter_of(content: Content, queue: str) -> Letter:
    """What stands on a dead letter; `queue` is where it comes from if it does not say."""
    headers = _headers_of(content.properties)
    return Letter(
        _text(headers.get(_LETTER)) or _digest(content),
        _text(headers.get(_QUEUE)) or queue,
        _text(headers.get(_REASON)) or _text(headers.get("x-first-death-reason")) or "unknown",
        max(1, _whole(headers.get(_COUNT))),
    )


def _with(content: Content, written: dict[str, Any]) -> Content:
    """As it was published by whoever has done so, but for what is `written` on it."""
    headers = {
        _CARRIED.get(name, name): value
        for name, value in _headers_of(content.properties).items()
        if name not in _SET_ASIDE and not name.startswith(_BROKERS)
    }
    properties = BasicProperties()
    # The broker would not let another user's name pass, and has measured its own time to live.
    kept = vars(content.properties) | {"headers": headers | written, "user_id": None}
    vars(properties).update(kept | {"expiration": None})
    properties.delivery_mode = DeliveryMode.Persistent.value
    return Content(properties, content.body)


def _short(text: str, header: str, headers: dict[str, Any]) -> str | None:
    """The text if a property has room for it; if not, it is put into that header."""
    if len(text) <= _SHORT // 4 or len(text.encode(errors="replace")) <= _SHORT:
        return text
    headers[header] = text
    return None


def _seconds(time: datetime) -> int | None:
    # For other consumers; we read the header.
    seconds = int(time.timestamp())
    return seconds if seconds >= 0 else None


def _check(properties: BasicProperties) -> None:
    try:
        size = sum(map(len, properties.encode()))
    except (AMQPError, ValueError) as error:
        raise MessageError(f"a property or header that AMQP cannot hold: {error!r:.100}") from error
    if size > _MAX_PROPERTIES:
        raise MessageError(f"properties of {size} bytes are over the limit of {_MAX_PROPERTIES}")


def _headers_of(properties: BasicProperties) -> dict[str, Any]:
    if not properties.headers:
        return {}
    return {_text(name) or "": value for name, value in properties.headers.items()}


def _is_users(name: str) -> bool:
    return name in _RESTORED or not name.startswith((_OURS, *_BROKERS))


def _text(value: Any) -> str | None:
    """A value of a header or property as text, whatever it is."""
    if value is None or isinstance(value, str):
        return value
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict() | list():
            return json.dumps(value, default=_text)
        case _:
            return str(value)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _content_type_of(value: Any) -> str:
    text = _text(value)
    return Message("").content_type if text is None else text


def _time_of(text: Any, seconds: Any) -> datetime | None:
    try:
        if isinstance(text, str):
            return datetime.fromisoformat(text)
        return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, TypeError, OSError):
        return None


def _digest(content: Content) -> str:
    told = f"{content.properties.message_id}\n".encode(errors="replace")
    return blake2b(told + content.body, digest_size=16).hexdigest()
