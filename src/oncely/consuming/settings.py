"""ConsumerSettings: the settings of a consumer, for its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oncely.consuming.running import Parts
from oncely.core.message import Message
from oncely.core.policy import Policy

Listener = Callable[[Any, Message], Any]
"""Called with an error and the message that failed with it."""
MetadataOf = Callable[[Message], Mapping[str, Any] | None]


@dataclass(slots=True, kw_only=True)
class ConsumerSettings:
    """How a consumer consumes."""

    name: str
    """The name of the consumer."""
    queue: str
    parts: Parts
    policy: Policy
    metadata_of: MetadataOf | None
    on_retry: Sequence[Listener]
    on_failed: Sequence[Listener]
    concurrency: int
    window: int
    grace_s: float
    is_ordered: bool
