"""A store that forwards every call to another, as a base for layers under a ledger."""

from collections.abc import Callable
from inspect import getmembers, isfunction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from oncely.stores.store import Records, Store

if TYPE_CHECKING:
    # To a type checker it is a store like any other.
    from oncely.stores.memory_store import MemoryStore as _SomeStore
else:
    _SomeStore = object


class ForwardingStore(_SomeStore):
    """Forwards all methods of Store to `store`, each call through `forward`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def forward(self, name: str, /, *arguments: Any, **named: Any) -> Any:
        """Call the method of this name; override this to intercept every call."""
        return getattr(self.store, name)(*arguments, **named)

    def beside(self) -> Records:
        """This store: calls over a connection of their own are forwarded, too."""
        return self


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: ForwardingStore, *arguments: Any, **named: Any) -> Any:
        return self.forward(name, *arguments, **named)

    return call


for _name, _member in getmembers(Store):
    if _name.startswith("_") or _name in vars(ForwardingStore):
        continue
    if isfunction(_member):
        setattr(ForwardingStore, _name, _forwarded(_name))
    else:
        setattr(ForwardingStore, _name, property(attrgetter(f"store.{_name}")))
