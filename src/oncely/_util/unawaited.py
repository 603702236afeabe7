"""Coroutines that calls have made, to find the one that was forgotten."""

from collections.abc import Coroutine
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, TypeVar

T = TypeVar("T")


class Unawaited:
    """Coroutines that were made, each with the call that has made it."""

    def __init__(self) -> None:
        self._made: list[tuple[str, Coroutine[Any, Any, Any]]] = []

    def note(self, call: str, made: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """`made`, which `call` has made."""
        while self._made and not _is_new(self._made[-1][1]):
            self._made.pop()
        self._made.append((call, made))
        return made

    def forgotten(self) -> str | None:
        """The first call that was not awaited, if any: those that were not cannot be any more."""
        new = [(call, made) for call, made in self._made if _is_new(made)]
        self._made.clear()
        for _, made in new:
            made.close()
        return new[0][0] if new else None


def _is_new(made: Coroutine[Any, Any, Any]) -> bool:
    return getcoroutinestate(made) == CORO_CREATED
