"""What a message passes on its way through oncely: calls, functions, files, objects, statements."""

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from sqlalchemy import Pool, event

import oncely

_SOURCES = str(Path(oncely.__file__).parent)


class Walk(NamedTuple):
    """What was counted. All of it is fewer where Python makes comprehensions part of a function."""

    calls: int
    functions: int
    files: int
    objects: int
    statements: int


class Walker:
    """Counts what runs in the threads that it follows, while it is told to."""

    def __init__(self) -> None:
        self._calls = self._objects = self._statements = 0
        self._codes: dict[CodeType, None] = {}
        self._is_counting = False

    @contextmanager
    def followed(self) -> Iterator[None]:
        """This thread, those that start meanwhile, and connections to SQLite that are opened."""
        event.listen(Pool, "connect", self._watch)
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            event.remove(Pool, "connect", self._watch)

    def _watch(self, connection: sqlite3.Connection, _: object) -> None:
        connection.set_trace_callback(self._see_statement)

    def begin(self) -> None:
        """Count from now on, from zero."""
        self._calls = self._objects = self._statements = 0
        self._codes.clear()
        self._is_counting = True

    @property
    def way(self) -> list[str]:
        """The files that it has passed, in the order in which it came to each."""
        names = (Path(code.co_filename).relative_to(_SOURCES).as_posix() for code in self._codes)
        return [*dict.fromkeys(names)]

    def end(self) -> Walk:
        """Stop counting. Returns what was counted since `begin`."""
        self._is_counting = False
        files = {code.co_filename for code in self._codes}
        return Walk(self._calls, len(self._codes), len(files), self._objects, self._statements)

    def _see_statement(self, _: str) -> None:
        self._statements += self._is_counting

    def _see(self, frame: FrameType, kind: str, _: object) -> None:
        if kind != "call" or not self._is_counting:
            return
        code = frame.f_code
        if code.co_filename.startswith(_SOURCES):
            self._calls += 1
            self._codes[code] = None
        self._objects += _makes_one_of_ours(frame)


def _makes_one_of_ours(frame: FrameType) -> bool:
    """Whether this call makes an object of a class of oncely's: also where Python wrote the code of
    its constructor, as for named tuples and data classes. One that is made without is not seen.
    """
    code = frame.f_code
    if not code.co_argcount:
        return False
    first = frame.f_locals[code.co_varnames[0]]
    if code.co_name == "__init__":
        # Not the constructor of a base class, which an own one has called.
        caller = frame.f_back
        is_first = (
            caller is None
            or caller.f_code.co_name != "__init__"
            or (caller.f_locals.get("self") is not first)
        )
        return is_first and type(first).__module__.startswith("oncely.")
    is_made = code.co_name == "_make" or (
        frame.f_globals.get("__name__", "").startswith("namedtuple_")
        and code.co_name in ("<lambda>", "__new__")
    )
    return is_made and isinstance(first, type) and first.__module__.startswith("oncely.")
