"""The bytes that a value's fingerprint is made of: equal for equal values, in every process."""

import json
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from oncely.core.errors import MessageError
from oncely.core.json_equality import equal_json, equal_number


def content_of(value: Any) -> bytes:
    """The content of `value` as bytes: the same for values that are equal as JSON, as 1 and 1.0
    are, and for one instant in two time zones. Bytes are their own content.

    Besides JSON values it takes dataclasses, enums, dates and times, Decimal, UUID and bytes.
    Raises MessageError for anything else: its content could differ from process to process.
    """
    if isinstance(value, bytes):
        return value
    try:
        return equal_json(json.dumps(value, sort_keys=True, default=_shown).encode())
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(
            f"fingerprint: {error}; write fingerprint= as a function that returns the values to "
            "compare, as JSON"
        ) from error


def _shown(value: Any) -> Any:
    """A JSON value for one whose type JSON does not know, with the name of that type."""
    kind = type(value).__qualname__
    match value:
        case Enum():
            return {kind: value.name}
        case bytes():
            return {kind: value.hex()}
        case datetime(tzinfo=zone) if zone is not None:
            return {kind: value.astimezone(UTC).isoformat()}
        case date() | time():
            return {kind: value.isoformat()}
        case Decimal() if value.is_finite():
            return {kind: equal_number(str(value))}
        case timedelta() | Decimal() | UUID():
            return {kind: str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        compared = (each.name for each in fields(value) if each.compare)
        return {kind: {name: getattr(value, name) for name in compared}}
    raise TypeError(f"{kind} has no JSON form")
