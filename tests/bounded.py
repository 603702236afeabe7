"""A store that is read in bounded parts alone, by a clock that goes on with each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.forwarding import ForwardingStore

from oncely import State
from oncely._util import clock
from oncely.stores.store import Store


class _Ticking(clock.Clock):
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class BoundedStore(ForwardingStore):
    """Refuses calls that read a ledger from end to end, and notes at how many records each window
    has looked.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.looked_at: list[int] = []
        self._ticking = _Ticking()

    @contextmanager
    def in_its_time(self) -> Iterator[None]:
        """By this process's clock a window takes 60 ms, so that a search has time for two."""
        with clock.replaced_by(self._ticking):
            yield

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Forward the call, unless it reads everything."""
        assert name != "read", "it reads all records"
        if name == "scan":
            assert arguments[0].state not in (None, State.COMPLETED), "it reads all that fit"
        if name == "tallies":
            assert arguments != (None,), "it counts all records"
        found = super().forward(name, *arguments, **named)
        if name == "window":
            self._ticking.now += 0.06
            self.looked_at.append(found.looked_at)
        return found
