"""The Idempotency-Key header field: reading and writing keys."""

import re
from collections.abc import Sequence

from oncely.core.errors import MessageError
from oncely.core.ids import check_id

FIELD = "Idempotency-Key"

# RFC 8941: a string (section 3.3.3), and parameters (3.1.2), which mean nothing here.
_BARE_ITEM = (
    r"-?\d{1,12}\.\d{1,3}|-?\d{1,15}"
    r'|"(?:[ !#-\[\]-~]|\\["\\])*"'
    r"|[A-Za-z*][\w!#$%&'*+\-.^`|~:/]*"
    r"|:[A-Za-z0-9+/=]*:|\?[01]"
)
_STRING = re.compile(
    r' *"(?P<text>(?:[ !#-\[\]-~]|\\["\\])*)"'
    rf"(?: *; *[a-z*][a-z0-9_\-.*]*(?:=(?:{_BARE_ITEM}))?)* *",
    re.ASCII,
)
_ESCAPED = re.compile(r"\\(.)")
_BARE = re.compile(r"[!#-+\--\[\]-~]+")
"""A bare key: without a quote, a comma, a space or a backslash."""


def read_key(values: Sequence[str], *, takes_bare: bool = False) -> str | None:
    """The key in a request's Idempotency-Key fields; None if there is no field.

    A key is a string of RFC 8941, in quotation marks. With `takes_bare` it may be without them.
    Raises MessageError, whose text is the reason, for an unusable key.
    """
    if not values:
        return None
    if len(values) > 1:
        raise MessageError(f"the request has more than one {FIELD} field")
    return check_id(_text(values[0], takes_bare=takes_bare), "key")


def _text(value: str, *, takes_bare: bool) -> str:
    if string := _STRING.fullmatch(value):
        return _ESCAPED.sub(r"\1", string["text"])
    bare = value.strip(" \t")
    if takes_bare and _BARE.fullmatch(bare):
        return bare
    raise MessageError(
        f'{FIELD} is not a string of RFC 8941: write the key in quotation marks, as in "8e03978e"'
    )


def write_key(key: str) -> str:
    """A key of printable ASCII as the field's value."""
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
