"""A store in which a test can meddle."""

from collections.abc import Callable
from typing import Any

from oncely.stores.store import Store
from oncely.testing.forwarding import ForwardingStore

_WRITES = ("insert", "swap", "transaction", "keep_retention", "bind", "unbind")
_READS = ("horizons", "load")


class MeddlingStore(ForwardingStore):
    """A store in which a test can meddle: `meddle` runs before each write.

    There it may write itself (a race), raise (an outage), or wait (a stall). `calls` names what
    the ledger asked for, in order.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.meddle: Callable[[], object] = lambda: None
        self.calls: list[str] = []

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """As the other store does it, noted and meddled with."""
        if name in _WRITES or name in _READS:
            self.calls.append(name)
        if name in _WRITES:
            self.meddle()
        return super().forward(name, *arguments, **named)

    def once(self, meddle: Callable[[], object]) -> None:
        """Meddle before the next write, and not again."""

        def meddle_once() -> None:
            self.meddle = lambda: None
            meddle()

        self.meddle = meddle_once
