"""Dead letters that failed alike, as one group: by consumer, class of the error and its text."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from oncely.core.errors import RefusedError, mask_passwords
from oncely.core.waiting import DeadLetter, digest
from oncely.ledger.ledger import Ledger
from oncely.ops.found import first
from oncely.ops.letters import every_dead_letter

MOST = 10_000
"""So many dead letters are looked at."""
_ALIKE = 300
"""Characters of an error that tell it from others."""
_ID = 12
"""Characters of a group's id."""

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


@dataclass(frozen=True, slots=True)
class LetterGroup:
    """Dead letters of one consumer that failed alike."""

    id: str
    """The same whenever they are grouped, on any ledger."""
    consumer: str
    error: str
    """What they have in common: the class of the error and the first line of its text, with what
    varies replaced, such as `<n>` for a number.
    """
    count: int
    first: float
    """When the earliest was set aside or last seen, in seconds since 1970."""
    last: float
    sample: int
    """The number of the newest of them."""
    ids: Sequence[int]
    """Their numbers."""


class FoundGroups(NamedTuple):
    """Groups of dead letters, the largest first."""

    groups: Sequence[LetterGroup]
    looked_at: int
    """How many dead letters were looked at."""
    more: bool
    """Whether there are others, which are in no group because of the limit: some of them may be of
    these groups, too.
    """


def letter_groups(ledger: Ledger, consumer: str | None = None, most: int = MOST) -> FoundGroups:
    """The first `most` dead letters, grouped by consumer and error. Raises ConfigError as
    `dead_letters` does.
    """
    found, more = first(every_dead_letter(ledger, consumer, with_bodies=False), most)
    members: dict[tuple[str, str], list[DeadLetter]] = {}
    for letter in found:
        members.setdefault((letter.key.consumer, alike(letter.reason)), []).append(letter)
    groups = [
        LetterGroup(
            id=_id_of(consumer, error),
            consumer=consumer,
            error=error,
            count=len(letters),
            first=min(letter.last_seen for letter in letters),
            last=max(letter.last_seen for letter in letters),
            sample=letters[-1].id,
            ids=[letter.id for letter in letters],
        )
        for (consumer, error), letters in members.items()
    ]
    groups.sort(key=lambda group: (-group.count, group.consumer, group.error))
    return FoundGroups(groups, len(found), more)


def letter_group(
    ledger: Ledger, id_: str, consumer: str | None = None, most: int = MOST
) -> FoundGroups:
    """The one group of that id, among the first `most` dead letters. Raises RefusedError where
    there is none: all of it may have been retried.
    """
    found = letter_groups(ledger, consumer, most)
    for group in found.groups:
        if group.id == id_:
            return found._replace(groups=[group])
    raise _unknown(id_)


def letters_to_export(
    ledger: Ledger, consumer: str | None, group: str | None
) -> Iterator[DeadLetter]:
    """All dead letters, or those of a group, in the order in which they came, read page by page.
    Raises as `dead_letters` and `letter_group` do, at once: the first is read before a file is
    replaced, or a request answered.
    """
    letters = every_dead_letter(ledger, consumer)
    if group is not None:
        letters = _of_group(letters, group)
    return chain([*islice(letters, 1)], letters)


def _of_group(letters: Iterator[DeadLetter], id_: str) -> Iterator[DeadLetter]:
    is_none = True
    for letter in letters:
        if _id_of(letter.key.consumer, alike(letter.reason)) == id_:
            is_none = False
            yield letter
    if is_none:
        raise _unknown(id_)


def _unknown(id_: str) -> RefusedError:
    return RefusedError(f"there is no group {id_!r} of dead letters; type: oncely dead groups")


def _id_of(consumer: str, error: str) -> str:
    return digest(consumer, error)[:_ID]


def alike(reason: str) -> str:
    """What a reason has in common with others of its kind, passwords masked."""
    [line, *_] = mask_passwords(reason[: 4 * _ALIKE]).strip().splitlines() or [""]
    for pattern, placeholder in _VARYING:
        line = pattern.sub(placeholder, line)
    return line[:_ALIKE]
