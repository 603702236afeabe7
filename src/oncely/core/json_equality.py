"""Bodies and values that are equal as JSON, in any notation."""

import json
from typing import Any

from oncely.core.json_body import named_once, no_constant

_EXACT_DIGITS = 15
"""Numbers with at most so many digits differ as floats if they differ as text."""


def equal_json(body: bytes) -> bytes:
    """The same bytes for all bodies that are equal as JSON: the order of names in an object, white
    space and the notation of numbers do not matter. A body that is not JSON, or that readers may
    read differently, is returned unchanged.
    """
    try:
        value = _decode(body.decode())
        return json.dumps(value, sort_keys=True).encode()
    except (ValueError, RecursionError):
        return body


def _float(text: str) -> Any:
    value = float(text)
    return _shown(value) if len(text) <= _EXACT_DIGITS and _is_usual(value) else equal_number(text)


def _is_usual(value: float) -> bool:
    return 1e-300 < abs(value) < 1e300


def _shown(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def equal_number(text: str) -> Any:
    """A number as digits and exponent: 1, 1.0 and 10e-1 are the same number."""
    mantissa, _, power = text.lower().partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, part = mantissa.removeprefix("-").partition(".")
    digits = f"{whole}{part}"
    kept = digits.rstrip("0")
    exponent = int(power or 0) - len(part) + len(digits) - len(kept)
    kept = kept.lstrip("0")
    if not kept:
        return 0
    if len(kept) <= _EXACT_DIGITS and _is_usual(value := float(f"{sign}{kept}e{exponent}")):
        return _shown(value)
    return {"": [sign, kept, exponent]}


_decode = json.JSONDecoder(
    # Names are in another form than numbers, so that the two cannot be confused.
    object_pairs_hook=lambda pairs: {f".{name}": it for name, it in named_once(pairs).items()},
    parse_float=_float,
    parse_int=lambda text: int(text) if len(text) <= _EXACT_DIGITS else equal_number(text),
    parse_constant=no_constant,
).decode
