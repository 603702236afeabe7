"""A task that is cancelled at one of its awaits, and at none before."""

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelledAt(Awaitable[T]):
    """Awaits `work`; its task is cancelled where it waits for the time after the first `place`
    times, and at the awaits that follow, so many `times` in a row.
    """

    def __init__(self, work: Awaitable[T], place: int, times: int = 1) -> None:
        self._work = work
        self._places = range(place, place + times)
        self.waits = 0
        """How often it has waited."""

    def __await__(self) -> Generator[Any, Any, T]:
        work = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                waited_for = work.send(None) if error is None else work.throw(error)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            if self.waits in self._places:
                task = asyncio.current_task()
                assert task is not None
                # The task is at work: it is cancelled where it waits, which is right now.
                task.cancel()
            self.waits += 1
            error = None
            try:
                yield waited_for
            except BaseException as raised:  # noqa: BLE001 - as a task would throw it.
                error = raised
