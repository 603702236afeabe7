"""Bodies as JSON, read so that no two readers understand one body differently."""

import json
from typing import Any

from oncely.core.errors import MessageError


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; refuse one that has a name twice."""
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("an object has a name twice")
    return names


def no_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads as numbers."""
    raise ValueError(f"{name} is not a JSON number")


_decode_json = json.JSONDecoder(object_pairs_hook=named_once, parse_constant=no_constant).decode


def read_json(body: bytes) -> Any:
    """A body as JSON.

    Raises MessageError where it is not JSON as RFC 8259 has it: not UTF-8, cut off, NaN, a name
    twice in one object, nested or long beyond what can be read safely.
    """
    try:
        return _decode_json(body.decode())
    except (ValueError, RecursionError) as error:
        raise MessageError("body is not JSON") from error
