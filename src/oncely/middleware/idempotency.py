"""Idempotent: what stands behind it runs once for each message."""

from collections.abc import Callable, Mapping
from typing import Any

from oncely.core.ids import fingerprint_of
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.ledger import Ledger
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.turn import Asked, Turn
from oncely.lifecycle.work import Work
from oncely.middleware.chain import BothWays, CallNext

Metadata = Mapping[str, Any] | Callable[[Message], Mapping[str, Any] | None] | None
"""What is kept with each record, or a function that tells it of a message."""


class Idempotent(BothWays):
    """Goes on once for each message to the consumer `name`; a duplicate gets the kept result.

    For chains without a Consumer, which has `idempotent` of its own and claims many at once. Raises
    what a function under `once` raises, and ConfigError for what is not a ledger, name or policy.
    """

    def __init__(
        self, ledger: Ledger, name: str, *, policy: Policy = Policy(), metadata: Metadata = None
    ) -> None:
        self._handling = Handling.under(ledger, name, policy)
        self._metadata = metadata

    def run(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        with self._work(message) as work:
            if work.is_new:
                work.result = call_next(message)
        return work.result

    async def run_async(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        async with self._work(message) as work:
            if work.is_new:
                work.result = await call_next(message)
        return work.result

    def _work(self, message: Message) -> Work:
        metadata = self._metadata(message) if callable(self._metadata) else self._metadata
        asked = Asked(message.id, fingerprint_of(message.body), message, metadata=metadata)
        return Work(self._handling, Turn(asked))
