"""The tutorial, followed from its page as a reader follows it: files written, commands typed, a
process killed, and every line of output compared with the line that is shown.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.docs.pages import DOCS
from tests.docs.shell import Shell, commands
from tests.processes import printed
from tests.turns import is_whole_run

PAGE = DOCS / "tutorial.md"

_BLOCK = re.compile(r"^```(\S*)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CAPTION = re.compile(r":caption: (\S+)\n\n")


class Block(NamedTuple):
    """What stands between two fences."""

    kind: str
    """`sh`, `console`; for a file its language: `python`, `diff`."""
    file: str
    text: str


def blocks(page: str) -> Iterator[Block]:
    """All of a page, in their order."""
    for first, language, text in _BLOCK.findall(page):
        caption = _CAPTION.match(text)
        if caption is None:
            yield Block(first, "", text)
        else:
            yield Block(language, caption[1], text[caption.end() :])


def patched(text: str, diff: str) -> str:
    """`text` with what a diff takes away replaced, once, by what it adds."""
    lines = diff.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    assert text.count(old) == 1, f"stands not once in the file: {old}"
    return text.replace(old, new)


def normal(lines: Sequence[str]) -> list[str]:
    """Without what differs from one run to another: widths, lengths of time and sizes."""
    text = "\n".join(" ".join(line.split()) for line in lines if line.strip())
    text = re.sub("─+", "─", text)
    text = re.sub(r"\b\d+ (s|min)\b", "N s", text)
    text = re.sub(r"\b[\d-]{10} [\d:]{8} UTC\b", "TIME UTC", text)
    return re.sub(r"\b[\d.]+ [kM]B\b", "N kB", text).splitlines()


def follow(page: str, folder: Path, programs: Path) -> int:
    """Do in `folder` what the page says after the installation; how many commands were typed.

    `programs` is where `python` and `oncely` are. Raises AssertionError where a command fails, or
    prints something else than the page shows.
    """
    typed = 0
    with closing(Shell(folder, programs)) as shell:
        for block in blocks(page):
            file = folder / block.file
            if block.kind == "python":
                file.write_text(block.text)
            elif block.kind == "diff":
                file.write_text(patched(file.read_text(), block.text))
            elif block.kind == "console":
                for command, shown in commands(block.text):
                    printed = shell.type(command, len(shown))
                    assert (command, normal(printed)) == (command, normal(shown))
                    typed += 1
    return typed


@pytest.mark.in_turn("long")
def test_tutorial(tmp_path: Path) -> None:
    """Whoever follows the page sees what it shows: up to the first decision after a kill, or, with
    ONCELY_TEST_ALL, to its end.
    """
    page = PAGE.read_text()
    assert page.count("$ kill -9 $!") == 3
    followed = page if is_whole_run() else page[: page.index("\n## Decide: hold")]
    typed = follow(followed, tmp_path, Path(sys.executable).parent)
    assert typed == followed.count("\n$ ") > 10


def test_every_block_is_followed() -> None:
    """A block of another kind would stand on the page untried."""
    kinds = [block.kind for block in blocks(PAGE.read_text())]
    assert kinds.count("sh") == 1
    assert set(kinds) == {"sh", "console", "python", "diff"}


def test_first_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program of the README runs when it is saved alone, and prints what is shown below it."""
    monkeypatch.chdir(tmp_path)
    for program, output in pairwise(blocks((DOCS.parent / "README.md").read_text())):
        if output.kind == "text":
            assert printed(program.text) == output.text
