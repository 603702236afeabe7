"""Errors for people: the line of one that is read first, and errors by kind. Those that differ only
in an id, a number or a time are of one kind, and are counted together.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from oncely.core.errors import describe, mask_passwords

_MOST_KINDS = 50
OTHERS = "other errors"
_LENGTH = 300
"""Characters of an error that tell it from others."""
_FRAME = re.compile(r'^(?P<margin>.*)  File "[^"]*", line \d+', re.MULTILINE)
"""A line of a traceback; within a group of exceptions there is a margin before it."""
_TRACED = "Traceback (most recent call last):"
_REFERENCE = re.compile(r"\s*\(Background on this error at: \S+\)$")
"""What SQLAlchemy ends its own errors with."""

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


def headline(error: str) -> str:
    """The line of an error that a person needs first: the class and the text of what was raised
    last. Not the frames before it, nor what a driver adds below it, such as SQL and parameters.
    """
    frames = [*_FRAME.finditer(error)]
    margin = frames[-1]["margin"] if frames else ""
    lines = error[frames[-1].start() if frames else 0 :].splitlines()
    # What belongs to a frame is further to the right; its file may not be told.
    of_frames = (f"{margin} ", _TRACED) if frames or error.startswith(_TRACED) else (_TRACED,)
    told = [line for line in lines if line.strip() and not line.startswith(of_frames)]
    first, *rest = [line.removeprefix(margin).strip() for line in told] or [""]
    if rest and (first.endswith(":") or rest[0].startswith(":")):
        # So Spark tells what is wrong in Java.
        first = f"{first.rstrip('.:')}: {rest[0].lstrip(': ')}"
    return _REFERENCE.sub("", first)


@lru_cache(1_024)
def kind_of(error: str) -> str:
    """What an error has in common with others of its kind, passwords masked."""
    line = mask_passwords(headline(error)[: 4 * _LENGTH])
    for pattern, placeholder in _VARYING:
        line = pattern.sub(placeholder, line)
    return line[:_LENGTH]


Kinds = Mapping[str, int]
"""Counts of errors by kind. The name of a kind is the first error of it, so that people see a real
one; what is of too many kinds is counted under OTHERS.
"""


def with_error(kinds: Kinds, error: BaseException | str | None) -> Kinds:
    """The counts with one more error."""
    return both(kinds, {headline(describe(error or "unknown"))[:_LENGTH]: 1})


def both(kinds: Kinds, others: Kinds) -> Kinds:
    """The sums of counts: a new mapping, as another thread may read the first."""
    total = dict(kinds)
    for text, count in others.items():
        known = (each for each in total if each == text or kind_of(each) == kind_of(text))
        kind = next(known, text if len(total) < _MOST_KINDS else OTHERS)
        total[kind] = total.get(kind, 0) + count
    return total


def commonest(kinds: Kinds) -> list[dict[str, Any]]:
    """The counts as JSON has them, the commonest first."""
    return [{"text": text, "count": count} for text, count in Counter(kinds).most_common()]
