"""What can identify a message: the one function that says whether an id is usable, and digests."""

import hashlib
from collections.abc import Collection
from typing import Any, cast
from uuid import UUID

from oncely.core.errors import MessageError

Id = str | int | UUID
"""What users may identify a message by; an int and a UUID are stored as text."""

MAX_ID_LENGTH = 255
"""Characters. The column of the ledger's table is as wide."""
MAX_FINGERPRINT_LENGTH = 64
"""Characters. The column of the ledger's table is as wide."""
_BEYOND_IDS = 10**MAX_ID_LENGTH
ID_IS_NO_STRING = "id is not a string"
"""The reason of `check_id`, for a source that turns everything into strings itself."""


def id_text(value: Any) -> Any:
    """An int or a UUID as the text by which a message is known; anything else as it is, which
    `check_id` judges.
    """
    if isinstance(value, UUID):
        return str(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(int(value)) if is_number and abs(value) < _BEYOND_IDS else value


def id_of_key(value: object) -> str | None:
    """The id that a `key=` function of the user's has returned; None where it returned None.

    Raises MessageError for anything other than text, an int or a UUID.
    """
    text: object = value if type(value) is str else id_text(value)
    if text is None or isinstance(text, str):
        return text
    kind = type(value).__name__
    raise MessageError(f"key returned a {kind}; return text, such as str(order.id)")


def check_id(value: object, what: str = "id", max_length: int = MAX_ID_LENGTH) -> str:
    """Return `value` if it can identify a message (or, as `what` says, a consumer).

    Raises MessageError, its text the reason: missing, empty (also when only white space), not a
    string, too long, or with a character that some databases cannot store.
    """
    if value is None:
        raise MessageError(f"missing {what}")
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a string")
    is_plain = value.isascii() and value.isprintable() and not value.isspace()
    if is_plain and 0 < len(value) <= max_length:
        return value  # The usual case. The lines below find out what is wrong.
    if not value or value.isspace():
        raise MessageError(f"empty {what}")
    if len(value) > max_length:
        raise MessageError(f"too long {what}")
    return check_text(value, what)


def are_plain_texts(values: Collection[object]) -> bool:
    """Whether all are text of the usual kind: printable ASCII. `check_text` tells of any other."""
    try:
        together = "".join(values)  # type: ignore[arg-type]
    except TypeError:
        return False
    return together.isascii() and together.isprintable()


def are_plain_ids(values: Collection[str | None]) -> bool:
    """Whether all are ids of the usual kind: printable ASCII without a space. Where they are not,
    ask `check_id` about each; to ask it about each of many takes ten times as long.
    """
    if not (are_plain_texts(values) and all(values)):
        return False
    ids = cast(Collection[str], values)
    return " " not in "".join(ids) and max(map(len, ids), default=0) <= MAX_ID_LENGTH


def check_ids(values: Collection[str | None]) -> None:
    """Raise MessageError as `check_id` does, if one of these cannot identify a message."""
    if not are_plain_ids(values):
        for value in values:
            check_id(value)


def check_text(value: object, what: str) -> str:
    """Return `value` if it is text that every database and broker can keep."""
    if not isinstance(value, str):
        raise MessageError(f"{what} is not a string")
    if "\0" in value:
        raise MessageError(f"{what} with NUL")
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise MessageError(f"{what} with a lone surrogate")
    return value


def check_fingerprint(value: str | None) -> str | None:
    """Return `value` if every store can keep it. Raises MessageError."""
    if value is None:
        return None
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise MessageError("fingerprint is not text of printable ASCII characters")
    if not 0 < len(value) <= MAX_FINGERPRINT_LENGTH:
        raise MessageError(
            f"fingerprint is not 1 to {MAX_FINGERPRINT_LENGTH} characters long; write a digest of "
            "the values to compare"
        )
    return value


def fingerprint_of(payload: bytes) -> str:
    """A short digest that differs for two payloads under one id.

    Raises MessageError where the payload is not bytes.
    """
    try:
        return hashlib.blake2b(payload, digest_size=16).hexdigest()
    except TypeError as error:
        raise MessageError("body is not bytes") from error
