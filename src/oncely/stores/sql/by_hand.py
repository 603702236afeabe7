"""Columns as people and other programs may have written them: read, and never refused. In SQLite,
text and bytes may stand in any column.

One row that cannot be read would take every list that has it with it.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from math import isfinite
from typing import Any


def value_of(text: str | bytes) -> Any:
    """The value of a JSON text; the text itself where it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # In SQLite a column of text may hold bytes.
        return text if isinstance(text, str) else text.decode(errors="replace")


def headers_of(text: str | bytes) -> Mapping[str, str]:
    """Headers of a message. What is not an object of JSON is one header, of the name "headers"."""
    found = value_of(text)
    named = found if isinstance(found, dict) else {"headers": found}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in named.items()
    }


def body_of(body: Any) -> bytes:
    """The body of a message; in SQLite it may be text, or a number."""
    return str(body).encode() if isinstance(body, str | int | float) else bytes(body)


def text_of(value: Any) -> str:
    """A text; bytes as the text that they are, as far as they are one."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else str(value)


def number_of(value: Any) -> float | None:
    """A number; None for what is not one, or is infinite."""
    if value is None or isinstance(value, str | bytes):
        return None
    number = float(value)
    return number if isfinite(number) else None


def whole_of(value: Any) -> int:
    """A whole number; 0 for what is not a number."""
    return value if type(value) is int else int(number_of(value) or 0)


def time_of(text: str | None) -> datetime | None:
    """A time as ISO 8601 has it; None for what is not one."""
    try:
        return None if text is None else datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
