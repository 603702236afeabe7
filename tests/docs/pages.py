"""The tables of the reference pages, read."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = DOCS / "reference"
_ROW = re.compile(r"(?<!\\)\|")
_CODE = re.compile(r"`([^`]+)`")


def rows(page: str, heading: str = "") -> Iterator[list[str]]:
    """The rows of the tables of a page, without those that name the columns; of those under
    `heading` alone, where one is given, up to the next.
    """
    text = (REFERENCE / page).read_text()
    if heading:
        [_, text] = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)
        text = re.split(r"^#+ ", text, flags=re.MULTILINE)[0]
    lines = text.splitlines()
    for before, line in pairwise(lines):
        is_head = line.startswith("|--") or (before.startswith("|") is False)
        if line.startswith("|") and not is_head:
            yield [cell.strip() for cell in _ROW.split(line)[1:-1]]


def codes(cell: str) -> list[str]:
    """What a cell has as code."""
    return _CODE.findall(cell)


def named(page: str, heading: str = "", column: int = 0) -> list[str]:
    """What the first column, or another, has as code, in order."""
    return [code for row in rows(page, heading) for code in codes(row[column])]
