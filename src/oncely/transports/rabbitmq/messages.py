"""Converts messages to and from AMQP: properties, headers and a body."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pika import BasicProperties, DeliveryMode

from oncely.core.message import Message
from oncely.transports.rabbitmq.properties import Encoded, decode_properties, moment_of
from oncely.transports.transport import OURS, check_header, too_large

_ID = f"{OURS}id"
_TYPE = f"{OURS}type"
_SOURCE = f"{OURS}source"
_CONTENT_TYPE = f"{OURS}content-type"
_TIME = f"{OURS}time"
_KEY = f"{OURS}key"
_BROKERS = ("x-delivery-count", "x-death", "x-first-death-", "x-last-death-")
"""The prefix of headers that the broker writes about its own actions."""
_CARRIED = {"CC": f"{OURS}cc", "BCC": f"{OURS}bcc"}
"""The broker would send copies to the queues in these headers, and closes the channel if it cannot
read them."""
_RESTORED = {ours: name for name, ours in _CARRIED.items()}
_TOLD = {
    "amqp-content-encoding": "content_encoding",
    "amqp-priority": "priority",
    "amqp-correlation-id": "correlation_id",
    "amqp-reply-to": "reply_to",
    "amqp-expiration": "expiration",
    "amqp-user-id": "user_id",
    "amqp-cluster-id": "cluster_id",
}
"""A message's headers for the AMQP properties for which it has no field."""
_HEADERS = {name: header for header, name in _TOLD.items()}
_TIMESTAMP = "amqp-timestamp"
_SENT = frozenset(("content_encoding", "correlation_id", "reply_to"))
"""Those that become properties again when the message is published. Others do not: the broker
refuses another user's name, and only the broker knows the rest of a time to live."""
_SHORT = 255
"""Bytes: the limit of a property in AMQP."""


class Content(NamedTuple):
    """A message as it is published."""

    properties: Encoded
    body: bytes


class Arrived(NamedTuple):
    """A delivery as a message."""

    message: Message
    problem: str | None
    """As in Delivery."""
    times: int
    """How often it was delivered, this time included, as far as the broker tells."""


def content_of(message: Message) -> Content:
    """The content to publish for a message. Raises MessageError for what does not fit into AMQP."""
    headers = {_CARRIED.get(name, name): value for name, value in message.headers.items()}
    properties: dict[str, Any] = {
        "message_id": _short(message.id, _ID, headers),
        "type": _short(message.type, _TYPE, headers),
        "app_id": _short(message.source, _SOURCE, headers),
        "content_type": _short(message.content_type, _CONTENT_TYPE, headers),
        "delivery_mode": DeliveryMode.Persistent.value,
    }
    for header in message.headers:
        check_header(header)
        # What was a property becomes the property again, if possible.
        match _TOLD.get(header), headers.get(header, ""):
            case name, value if name in _SENT and len(value.encode(errors="replace")) <= _SHORT:
                properties[name] = headers.pop(header)
            case "priority", value if value.isascii() and value.isdigit() and int(value) < 256:
                properties["priority"] = int(headers.pop(header))
    if message.key is not None:
        headers[_KEY] = message.key
    if message.time is not None:
        headers[_TIME] = message.time.isoformat()
        # For consumers other than oncely, which reads the header.
        seconds = int(message.time.timestamp())
        properties["timestamp"] = seconds if seconds >= 0 else None
    return Content(Encoded(headers=headers or None, **properties), message.body)


def arrived(raw: bytes, body: bytes, *, redelivered: bool, max_bytes: int) -> Arrived:
    """The delivery with these encoded properties."""
    properties, problem = decode_properties(raw)
    if isinstance(properties.get("message_id"), bytes):
        problem = problem or "the message id is not UTF-8"
    problem = problem or too_large(body, max_bytes)
    return Arrived(message_of(properties, body), problem, count_of(properties, redelivered))


def properties_of(properties: BasicProperties) -> Mapping[str, Any]:
    """Those of pika's that are there, by their names."""
    return {name: value for name, value in vars(properties).items() if value is not None}


def message_of(properties: Mapping[str, Any], body: bytes) -> Message:
    """The message of any publisher. Properties that cannot be understood are left out."""
    said = properties.get
    headers = {_text(name) or "": value for name, value in (said("headers") or {}).items()}
    content_type = _text(headers.get(_CONTENT_TYPE, said("content_type")))
    return Message(
        _text(headers.get(_ID, said("message_id"))) or "",
        body,
        _text(headers.get(_TYPE, said("type"))) or "",
        _users(headers, properties),
        _text(headers.get(_SOURCE, said("app_id"))) or "",
        _time_of(headers.get(_TIME), said("timestamp")),
        Message("").content_type if content_type is None else content_type,
        _text(headers.get(_KEY)),
    )


def count_of(properties: Mapping[str, Any], redelivered: bool) -> int:
    """How often it was delivered, this time included, as far as the broker tells."""
    # On a first delivery only the publisher can have set that header.
    counted = (properties.get("headers") or {}).get("x-delivery-count") if redelivered else 0
    return counted + 1 if isinstance(counted, int) and counted > 0 else 1


def _users(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> dict[str, str]:
    users = {
        _RESTORED.get(name, name): _text(value) or ""
        for name, value in headers.items()
        if name in _RESTORED or not name.startswith((OURS, *_BROKERS))
    }
    for name, value in properties.items():
        if name in _HEADERS:
            users[_HEADERS[name]] = _text(value) or ""
    timestamp = properties.get("timestamp")
    if timestamp is not None and moment_of(timestamp) is None:
        users[_TIMESTAMP] = str(timestamp)
    return users


def _short(text: str, header: str, headers: dict[str, Any]) -> str | None:
    """The text, if it fits into a property; else it is put into that header."""
    if len(text) <= _SHORT // 4 or len(text.encode(errors="replace")) <= _SHORT:
        return text
    headers[header] = text
    return None


def _text(value: Any) -> str | None:
    """Any value of a header or property as text."""
    if value is None or isinstance(value, str):
        return value
    match value:
        case bytes():
            return value.decode(errors="backslashreplace")
        case dict() | list():
            return json.dumps(value, default=_text)
        case _:
            return str(value)


def _time_of(text: Any, timestamp: Any) -> datetime | None:
    if isinstance(text, str):
        try:
            return datetime.fromisoformat(text)
        except ValueError:
            return None
    return moment_of(timestamp) if isinstance(timestamp, int) else None
