"""Row refusals: database errors that only say that one row cannot be stored."""

from typing import Any

_SERVERS_CLASSES = frozenset(
    ("08", "0A", "0B", "0L", "0P", "25", "26", "28", "2B", "2D", "34", "3B", "3D", "3F", "40")
).union(("42", "53", "55", "57", "58", "72", "F0", "HV", "XX"))
"""The classes of PostgreSQL's states for faults of a server, a session or a statement, which affect
every row. All others are a row's: its values, their length or depth, constraints, and errors of
triggers, also with states of their own."""
_ROWS_CLASSES = frozenset(("22", "23", "44", "45"))
"""MariaDB and MySQL put most errors into a general class. These codes are a row's."""
_ROWS_NUMBERS = frozenset((1118, 1153, 1301, 1366, 1526, 1644, 1713, 1748, 3819, 4025))
"""So are these of their errors: a row, a value or what comes of it is too large; a value of the
wrong kind; no partition for it; a trigger's own word; and constraints that are not held."""
_ROWS_KINDS = frozenset(("DataError", "IntegrityError"))
_MALFORMED = "malformed JSON"
"""SQLite's message if an index or a check reads JSON; its code is the general one."""


def refusal(error: BaseException) -> str | None:
    """The database's reason to refuse a row; None for any other error."""
    cause = getattr(error, "orig", None) or error
    if not _is_of_a_row(cause):
        # MariaDB closes the connection if a packet is too large: the error here is that of the
        # rollback, and the first error is its context.
        return None if error.__context__ is None else refusal(error.__context__)
    is_numbered = cause.args and isinstance(cause.args[0], int)
    text = str(cause.args[-1] if is_numbered else cause)
    return next(iter(text.strip().splitlines()), type(cause).__name__)


def _is_of_a_row(cause: Any) -> bool:
    if any(kind.__name__ in _ROWS_KINDS for kind in type(cause).__mro__):
        return True
    state = getattr(cause, "sqlstate", None)
    if hasattr(cause, "pgconn"):
        # An error without a state is the driver's, about its connection.
        return state is not None and state[:2] not in _SERVERS_CLASSES
    is_numbered = cause.args and cause.args[0] in _ROWS_NUMBERS
    return is_numbered or (state or "")[:2] in _ROWS_CLASSES or str(cause) == _MALFORMED
