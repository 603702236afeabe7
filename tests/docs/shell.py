"""A shell for what a page tells its readers to type."""

import os
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

DEADLINE_S = 120.0


def commands(console: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a block `console`, with the lines that are shown of its output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


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
