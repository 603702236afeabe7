"""ConsumerSettings: the settings of a consumer, for its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oncely.consumer.routes import Routes
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.wrapping import is_async
from oncely.middleware.chain import BothWays, Middleware

Listener = Callable[[Any, Message], Any]
"""Called with an error and the message that failed with it."""
MetadataOf = Callable[[Message], Mapping[str, Any] | None]


@dataclass(slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer consumes."""

    name: str
    """The name of the consumer."""
    queue: str
    routes: Routes = field(default_factory=Routes)
    outer: list[Middleware] = field(default_factory=list)
    """The middleware of every message, duplicates too."""
    inner: list[Middleware] = field(default_factory=list)
    """The middleware of messages whose handler runs."""
    lifecycle: Lifecycle | None = None
    """What the ledger does; None without one, and before the consumer runs."""
    begins: Any = None
    """A source of transactions, plain or async, if handlers work in one with their claims."""
    is_together: bool = False
    """Whether handlers take all the messages of a transaction at once."""
    policy: Policy = field(default_factory=Policy)
    metadata_of: MetadataOf | None = None
    on_retry: list[Listener] = field(default_factory=list)
    on_failed: list[Listener] = field(default_factory=list)
    concurrency: int = 1
    window: int = 2_000
    grace_s: float = 30.0
    is_ordered: bool = False

    @property
    def are_async(self) -> bool:
        """Whether any handler or middleware is async."""
        middleware = (each for each in (*self.outer, *self.inner) if not isinstance(each, BothWays))
        return self.routes.are_async or any(map(is_async, middleware))

    @property
    def joined(self) -> Lifecycle:
        """The lifecycle of messages whose handlers work in transactions."""
        assert self.lifecycle is not None  # noqa: S101 - without a ledger there are none.
        return self.lifecycle
