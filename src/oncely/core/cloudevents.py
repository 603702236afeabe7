"""The attributes of a CloudEvent as the fields of a Message.

A missing attribute is never invented, and a wrong one raises MessageError: the message's identity
depends on them.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.message import Message as MimeHeaders
from typing import Any
from urllib.parse import unquote

from oncely.core.errors import MessageError
from oncely.core.ids import MAX_ID_LENGTH, check_id
from oncely.core.json_body import read_json

_MAX_LENGTH = 65_536
"""Characters of an attribute that is required."""
_REQUIRED = ("specversion", "source", "id", "type")
_TEXTS = frozenset(("subject", "datacontenttype", "dataschema"))
"""Attributes that must be text, not empty, where the event has them."""
_FIELDS = frozenset((*_REQUIRED, "time", "datacontenttype"))
"""The attributes that do not go to the message's headers."""

_FAMILY = "application/cloudevents"
_JSON = "application/json"
_JSON_TYPE = re.compile(r"[^/]+/(?:.+\+)?json")
_NAME = re.compile("[a-z0-9]+")
_SHOWN = 40
_HEADER = re.compile(r"(?P<binding>ce[-_]|cloudevents[:_])(?P<name>.+)|content-type", re.DOTALL)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def fields_of(headers: Mapping[str, Any], body: bytes) -> dict[str, Any]:
    """The fields of the message that an event is; raises as `Message.from_cloudevent` says."""
    attributes, data = _read(headers, body)
    for name in _REQUIRED:
        check_id(attributes.get(name), name, _MAX_LENGTH)
    if "time" in attributes:
        attributes["time"] = _time(attributes["time"])
    _judge(attributes)
    others = {name: _text(value) for name, value in attributes.items() if name not in _FIELDS}
    # One id for the pair: a JSON array, or where that is too long its digest.
    pair = _compact([attributes["source"], attributes["id"]])
    id_ = pair.decode()
    return {
        "id": id_ if len(id_) <= MAX_ID_LENGTH else f"sha256:{hashlib.sha256(pair).hexdigest()}",
        "body": data,
        "type": attributes["type"],
        "headers": others,
        "source": attributes["source"],
        "time": attributes.get("time"),
        "content_type": attributes.get("datacontenttype", _JSON),
        "key": others.get("partitionkey"),
    }


def _judge(attributes: Mapping[str, Any]) -> None:
    """Raise MessageError for what version 1.0 of the specification does not allow."""
    if attributes["specversion"] != "1.0":
        raise MessageError("specversion is not 1.0")
    if "time" in attributes and attributes["time"].tzinfo is None:
        raise MessageError("time has no time zone")
    for name in _TEXTS & attributes.keys():
        check_id(attributes[name], name, _MAX_LENGTH)
    for name in attributes.keys() - _FIELDS - _TEXTS:
        if name == "data" or not _NAME.fullmatch(name):
            shown = " ".join(name.split())[:_SHOWN]
            raise MessageError(
                f"{shown!r} is not an attribute name: use lowercase letters and digits"
            )


def _read(headers: Mapping[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """The attributes that are set, and the data."""
    attributes = _header_attributes(headers)
    media_type = _mime(attributes.get("datacontenttype")).get_content_type()
    if media_type == f"{_FAMILY}+json":
        return _structured(body)
    if media_type.startswith(f"{_FAMILY}-batch"):
        raise MessageError("a batch of CloudEvents is many messages; split it first")
    if media_type.startswith(_FAMILY):
        raise MessageError(f"a CloudEvent that is not JSON; send {_FAMILY}+json")
    return attributes, body


def _mime(content_type: object) -> MimeHeaders:
    headers = MimeHeaders()
    headers["content-type"] = str(content_type or _JSON)
    return headers


def _time(value: object) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        with suppress(ValueError):
            return datetime.fromisoformat(value.upper())
    raise MessageError('time is not an RFC 3339 time, such as "2026-03-01T12:00:00Z"')


def _text(value: object) -> str:
    match value:
        case str():
            return value
        case datetime():
            return value.isoformat()
        case _:
            return _compact(value).decode()


def _compact(value: object) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise MessageError("a CloudEvent with a value that JSON cannot hold") from error


# ---- Binary mode: the attributes are headers -----------------------------------------------------


def _header_attributes(headers: Mapping[str, Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for header, value in headers.items():
        found = _HEADER.fullmatch(header.lower())
        if found and value is not None:
            name = found["name"] or "datacontenttype"
            read = _header_value(found["binding"], name, value)
            if attributes.setdefault(name, read) != read:
                raise MessageError(f"two headers give {name!r} different values")
    return attributes


def _header_value(binding: str | None, name: str, value: Any) -> Any:
    """The value before the binding encoded it: text, or in AMQP possibly another type."""
    try:
        if name == "time" and isinstance(value, int):
            return _EPOCH + timedelta(milliseconds=value)
        text = value.decode() if isinstance(value, bytes) else value
        if binding == "ce-" and isinstance(text, str):
            quoted = _QUOTED.fullmatch(text)
            text = _ESCAPED.sub(r"\1", quoted[1]) if quoted else text
            return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise MessageError(f"{name!r} is not UTF-8") from error
    except OverflowError as error:
        raise MessageError("time is out of range") from error
    return text


# ---- Structured mode: all is one JSON object -----------------------------------------------------


def _structured(body: bytes) -> tuple[dict[str, Any], bytes]:
    event = read_json(body)
    if not isinstance(event, dict):
        raise MessageError("a CloudEvent is a JSON object")
    data = _data(event)
    members = {"data", "data_base64"}
    return {n: v for n, v in event.items() if v is not None and n not in members}, data


def _data(event: Mapping[str, Any]) -> bytes:
    """The body that a sender in binary mode would have sent."""
    encoded = event.get("data_base64")
    if encoded is not None:
        if "data" in event:
            raise MessageError("both data and data_base64 are set; send one of them")
        try:
            return base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError) as error:
            raise MessageError("data_base64 is not base64") from error
    if "data" not in event:
        return b""
    data, declared = event["data"], _mime(event.get("datacontenttype"))
    if _JSON_TYPE.fullmatch(declared.get_content_type()):
        return _compact(data)
    if not isinstance(data, str):
        raise MessageError("data is not text, and datacontenttype is not JSON")
    try:
        return data.encode(declared.get_content_charset("utf-8"))
    except (LookupError, ValueError) as error:
        raise MessageError("data cannot be encoded in the charset of datacontenttype") from error
