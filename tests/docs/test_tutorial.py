"""The tutorial, followed from its page as a reader follows it: files written, commands typed, a
process killed, and every line of output compared with the line that is shown.
"""

import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
DEADLINE_S = 120.0

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
    return re.sub(r"\b[\d.]+ [kM]B\b", "N kB", text).splitlines()


class Shell:
    """A shell in which commands are typed one after another."""

    def __init__(self, folder: Path, programs: Path) -> None:
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._process = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip("\n"))

    def type(self, command: str, shown: int) -> list[str]:
        """What the command prints, up to its end; of one in the background, as many lines as are
        shown of it.
        """
        assert self._process.stdin is not None
        in_background = command.endswith("&")
        end = "" if in_background else "\necho the end of $?"
        self._process.stdin.write(f"{command}{end}\n")
        self._process.stdin.flush()
        printed: list[str] = []
        while not (in_background and len(printed) == shown):
            line = self._lines.get(timeout=DEADLINE_S)
            if line.startswith("the end of "):
                assert line == "the end of 0", (command, line, printed)
                break
            # The shell's own word on a process that was killed differs from shell to shell.
            if not re.search(r"\bKilled\b", line):
                printed.append(line)
        return printed

    def close(self) -> None:
        """End it, with what it has started in the background."""
        assert self._process.stdin is not None
        self._process.stdin.write("kill -9 $(jobs -p) 2>/dev/null\n")
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


def follow(page: str, folder: Path, programs: Path) -> int:
    """Do in `folder` what the page says after the installation; how many commands were typed.

    `programs` is where `python` and `oncely` are. Raises AssertionError where a command fails, or
    prints something else than the page shows.
    """
    typed = 0
    shell = Shell(folder, programs)
    try:
        for block in blocks(page):
            file = folder / block.file
            if block.kind == "python":
                file.write_text(block.text)
            elif block.kind == "diff":
                file.write_text(patched(file.read_text(), block.text))
            elif block.kind == "console":
                for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                    command, *shown = part.splitlines()
                    printed = shell.type(command, len(shown))
                    assert (command, normal(printed)) == (command, normal(shown))
                    typed += 1
    finally:
        shell.close()
    return typed


def test_tutorial(tmp_path: Path) -> None:
    """Whoever follows the page sees what it shows, three kills included."""
    page = PAGE.read_text()
    assert page.count("$ kill -9 $!") == 3
    assert follow(page, tmp_path, Path(sys.executable).parent) > 20


def test_tutorial_is_compared(tmp_path: Path) -> None:
    """A page that shows what is not printed is found."""
    page = PAGE.read_text().replace("\nsms-1: your parcel", "\nsms-1: your letter", 1)
    with pytest.raises(AssertionError, match="your letter"):
        follow(page, tmp_path, Path(sys.executable).parent)


def test_every_block_is_followed() -> None:
    """A block of another kind would stand on the page untried."""
    kinds = [block.kind for block in blocks(PAGE.read_text())]
    assert kinds.count("sh") == 1
    assert set(kinds) == {"sh", "console", "python", "diff"}
