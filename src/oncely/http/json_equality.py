"""Bodies that are equal as JSON, however they are written."""

import json
from decimal import Decimal
from typing import Any


def equal_json(body: bytes) -> bytes:
    """The same bytes for all bodies that are equal as JSON: the order of an object's names, white
    space and how a number is written tell nothing. What is not JSON, or is not the same for every
    reader, is returned as it is.
    """
    try:
        value = _decode(body.decode())
        return json.dumps(value, sort_keys=True).encode()
    except (ValueError, RecursionError, ArithmeticError):
        return body


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands twice in one object")
    # Apart from what stands for a number.
    return {f".{name}": value for name, value in pairs}


def _number(text: str) -> Any:
    """A number as its digits and their place: 1, 1.0 and 10e-1 are one."""
    sign, digits, exponent = Decimal(text).as_tuple()
    plain = "".join(map(str, digits))
    kept = plain.rstrip("0")
    place = int(exponent) + len(plain) - len(kept)
    kept = kept.lstrip("0")
    return {"": [sign, kept, place]} if kept else {"": [0, "", 0]}


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_decode = json.JSONDecoder(
    object_pairs_hook=_named_once,
    parse_float=_number,
    parse_int=_number,
    parse_constant=_no_number,
).decode
