"""MeddlingStore: a store whose calls a test can intercept."""

from collections.abc import Callable
from typing import Any

from tests.forwarding import ForwardingStore

from oncely.core.errors import StoreUnavailable
from oncely.stores.store import Store

_WRITES = ("insert", "update", "delete", "transaction", "keep_retention")
_READS = ("horizons", "load")


def away() -> None:
    """To meddle with: the store cannot be reached."""
    raise StoreUnavailable("the store is away")


class MeddlingStore(ForwardingStore):
    """A store whose calls a test can intercept: `meddle` runs before each write.

    `meddle` may itself write (a race), raise (an outage), or wait (a stall). `calls` has the names
    of the ledger's calls, in order.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.meddle: Callable[[], object] = lambda: None
        self.calls: list[str] = []

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Note the call, run `meddle` before a write, and forward the call."""
        if name in _WRITES or name in _READS:
            self.calls.append(name)
        if name in _WRITES:
            self.meddle()
        return super().forward(name, *arguments, **named)

    def once(self, meddle: Callable[[], object]) -> None:
        """Run `meddle` before the next write only."""

        def meddle_once() -> None:
            self.meddle = lambda: None
            meddle()

        self.meddle = meddle_once
