"""Which of a database's errors say that one row cannot be stored, and no more than that."""

from typing import Any

_SERVERS_CLASSES = frozenset(
    ("08", "0A", "0B", "0L", "0P", "25", "26", "28", "2B", "2D", "34", "3B", "3D", "3F", "40")
).union(("42", "53", "55", "57", "58", "72", "F0", "HV", "XX"))
"""The classes of PostgreSQL's states that say that a server, a session or a statement is at fault,
and so meet every row. All others are a row's: its values, their length or depth, constraints, and
what triggers raise, under whatever state of their own."""
_ROWS_CLASSES = frozenset(("22", "23", "44", "45"))
"""MariaDB and MySQL leave most of their errors in a general class. These are a row's."""
_ROWS_NUMBERS = frozenset((1118, 1153, 1301, 1366, 1526, 1644, 1713, 1748, 3819, 4025))
"""So are these of their errors: a row, a value or what comes of it is too large; a value of the
wrong kind; no partition for it; a trigger's own word; and constraints that are not held."""
_ROWS_KINDS = frozenset(("DataError", "IntegrityError"))
_MALFORMED = "malformed JSON"
"""What SQLite says where an index or a check looks into a text; by its code it is any error."""


def refusal(error: BaseException) -> str | None:
    """What the database says of a row that it does not take; None for any other error."""
    cause = getattr(error, "orig", None) or error
    if not _is_of_a_row(cause):
        # MariaDB hangs up on what is too large for it: that nothing can be rolled back any more is
        # the error that is seen, and the first stands behind it.
        return None if error.__context__ is None else refusal(error.__context__)
    is_numbered = cause.args and isinstance(cause.args[0], int)
    text = str(cause.args[-1] if is_numbered else cause)
    return next(iter(text.strip().splitlines()), type(cause).__name__)


def _is_of_a_row(cause: Any) -> bool:
    if any(kind.__name__ in _ROWS_KINDS for kind in type(cause).__mro__):
        return True
    state = getattr(cause, "sqlstate", None)
    if hasattr(cause, "pgconn"):
        # Without a state it is the driver's, about its connection.
        return state is not None and state[:2] not in _SERVERS_CLASSES
    is_numbered = cause.args and cause.args[0] in _ROWS_NUMBERS
    return is_numbered or (state or "")[:2] in _ROWS_CLASSES or str(cause) == _MALFORMED
