"""Values of rows as Python has them.

Raises UnreadableRow for a value that its column cannot have. In SQLite any value may stand in any
column, PostgreSQL has infinite times, and JSON is text that somebody may have changed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from math import isfinite
from operator import index
from typing import Any, NamedTuple

from sqlalchemy import Boolean, Column, Double, Float, Integer, LargeBinary, Table

from oncely.core.errors import UnreadableRow, mask_passwords
from oncely.core.ids import MAX_ID_LENGTH
from oncely.core.record import State
from oncely.core.shown import shown

_JSON: Mapping[str, type] = {
    "metadata": object,
    "result": object,
    "headers": dict,
    "totals": dict,
    "lags": dict,
    "seconds": list,
}
"""The columns with JSON, and what it must be."""
_JSON_NAMES: Mapping[type, str] = {object: "JSON", dict: "a JSON object", list: "a JSON list"}
_NAMED = ("provider", "message_id", "queue")
"""The columns that say whose row it is."""
_SHOWN = 60
"""Characters of an unreadable value that are shown."""


class _Kind(NamedTuple):
    what: str
    read: Callable[[Any], Any]


def read(table: Table, names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """The values of these columns, which a row begins with, by their names; JSON is read. Raises
    UnreadableRow.
    """
    kinds, found = _kinds(table), {}
    for name, value in zip(names, row, strict=False):
        try:
            is_absent = value is None and table.c[name].nullable
            found[name] = None if is_absent else kinds[name].read(value)
        except (TypeError, ValueError, RecursionError):
            raise _unreadable(table, dict(zip(names, row, strict=False)), name) from None
    return found


@cache
def _kinds(table: Table) -> Mapping[str, _Kind]:
    return {column.name: _kind(column) for column in table.c}


def _kind(column: Column[Any]) -> _Kind:
    if column.name in _JSON:
        kind = _JSON[column.name]
        return _Kind(_JSON_NAMES[kind], lambda value: _json(value, kind))
    if column.name == "sent_at":
        return _Kind("an ISO 8601 time", datetime.fromisoformat)
    if column.name == "status":
        return _Kind(f"one of {', '.join(State)}", State)
    match column.type:
        case Boolean():
            return _Kind("a boolean", lambda value: bool(index(value)))
        case Integer():
            return _Kind("a whole number", index)
        case Double():
            return _Kind("a number", _finite)
        case Float():
            return _Kind("a time", _finite)
        case LargeBinary():
            return _Kind("bytes", lambda value: bytes(memoryview(value)))
        case _:
            return _Kind("text", _text)


def _json(text: str | bytes, kind: type) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise TypeError
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if isinstance(value, str | bytes) or not isfinite(number):
        raise ValueError
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _unreadable(table: Table, row: Mapping[str, Any], wrong: str) -> UnreadableRow:
    """The error that names the row, the column and the value, and says what to type."""
    key = [column.name for column in table.primary_key]
    if not row.keys() >= {*key}:
        key = [name for name in _NAMED if name in row]
        if "message_id" not in key:
            # It is one of several rows of which only this value is known.
            key.append(wrong)
    whose = ", ".join(f"{name} {_literal(row[name])}" for name in _NAMED if name in row)
    what = _kinds(table)[wrong].what
    where = " AND ".join(f"{name} = {_literal(row[name])}" for name in key)
    return UnreadableRow(
        f"{table.fullname}: {wrong} is {_literal(row[wrong], _SHOWN)}, not {what}"
        f"{whose and f' ({whose})'}; type in SQL:"
        f" UPDATE {table.fullname} SET {wrong} = <{what}> WHERE {where}"
    )


def _literal(value: Any, most: int = 2 * MAX_ID_LENGTH) -> str:
    """A value as SQL has it, on one line; one that is too long is cut."""
    if not isinstance(value, str):
        return repr(value)[:most]
    text = mask_passwords(shown(value[:most].replace("'", "''")))
    return f"'{text}'"
