"""Forks: an object with locks or threads starts afresh in the child, where no thread of it runs."""

import os
import sys
import traceback
import weakref
from contextlib import suppress
from typing import NoReturn, Protocol


class Fresh(Protocol):
    """An object that can start afresh."""

    def start_afresh(self) -> None:
        """Leave locks, threads and connections to the parent: called in a forked child."""


_things: "weakref.WeakSet[Fresh]" = weakref.WeakSet()


def afresh_in_children(thing: Fresh) -> None:
    """From now on, and as long as it lives, `thing` starts afresh in every forked child."""
    _things.add(thing)


class Pausable(Fresh, Protocol):
    """An object that has to be at rest when the process is forked."""

    def pause(self) -> None:
        """Come to rest, and stay at rest: called before a fork, in the thread that forks."""

    def go_on(self) -> None:
        """Go on: called in the parent after the fork."""


_pausable: "weakref.WeakSet[Pausable]" = weakref.WeakSet()
_paused: list[Pausable] = []


def pause_at_forks(thing: Pausable) -> None:
    """From now on, and as long as it lives, `thing` pauses while the process is forked, and starts
    afresh in the child.
    """
    _pausable.add(thing)


def _pause_all() -> None:
    _paused[:] = _pausable
    for thing in _paused:
        thing.pause()


def _go_on_all() -> None:
    while _paused:
        _paused.pop().go_on()


def _start_all_afresh() -> None:
    _paused.clear()
    for thing in [*_pausable, *_things]:
        thing.start_afresh()


os.register_at_fork(before=_pause_all, after_in_parent=_go_on_all, after_in_child=_start_all_afresh)


def end_child(error: BaseException | None) -> NoReturn:
    """End a process that was forked inside a handler, where it would leave the handler, with
    `error`.

    What comes after the handler is the parent's: claims, connections, and their transactions.
    """
    if error is not None and not isinstance(error, SystemExit):
        traceback.print_exception(error)
    code = error.code if isinstance(error, SystemExit) else int(error is not None)
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
