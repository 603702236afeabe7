"""Errors by kind: those that differ only in an id, a number or a time are alike, and are counted
together.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from oncely.core.errors import describe, mask_passwords

_MOST_KINDS = 50
OTHERS = "other errors"
_ALIKE = 300
"""Characters of an error that tell it from others."""

# Before what is shorter, and would be found in it.
_VARYING: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), placeholder)
    for pattern, placeholder in (
        (r"\b[a-z][a-z0-9+.-]*://\S+", "<url>"),
        (r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+", "<address>"),
        (r'"[^"]*"', "<text>"),
        (r"(?<!\w)'[^']*'(?!\w)", "<text>"),
        (r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<id>"),
        (r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?", "<time>"),
        (r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b", "<address>"),
        (r"\b0[xX][0-9a-fA-F]+\b", "<hex>"),
        (r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b", "<hex>"),
        (r"\b(?=[\w-]*\d)[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)+\b", "<id>"),
        (r"\d+(?:[.,]\d+)*", "<n>"),
    )
]


@lru_cache(1_024)
def alike(reason: str) -> str:
    """What a reason has in common with others of its kind, passwords masked."""
    [line, *_] = mask_passwords(reason[: 4 * _ALIKE]).strip().splitlines() or [""]
    for pattern, placeholder in _VARYING:
        line = pattern.sub(placeholder, line)
    return line[:_ALIKE]


Kinds = Mapping[str, int]
"""Counts of errors by kind. The name of a kind is the first error of it, so that people see a real
one; what is of too many kinds is counted under OTHERS.
"""


def with_error(kinds: Kinds, error: BaseException | str | None) -> Kinds:
    """The counts with one more error."""
    text, _, _ = describe(error or "unknown", _ALIKE).strip().partition("\n")
    return both(kinds, {text: 1})


def both(kinds: Kinds, others: Kinds) -> Kinds:
    """The sums of counts: a new mapping, as another thread may read the first."""
    total = dict(kinds)
    for text, count in others.items():
        known = (each for each in total if each == text or alike(each) == alike(text))
        kind = next(known, text if len(total) < _MOST_KINDS else OTHERS)
        total[kind] = total.get(kind, 0) + count
    return total


def commonest(kinds: Kinds) -> list[dict[str, Any]]:
    """The counts as JSON has them, the commonest first."""
    return [{"text": text, "count": count} for text, count in Counter(kinds).most_common()]
