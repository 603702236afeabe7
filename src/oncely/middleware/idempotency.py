"""Idempotent: the rest of the chain runs once for each message."""

from collections.abc import Callable, Mapping
from typing import Any

from oncely.core.ids import fingerprint_of
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.core.turn import Turn
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.lifecycle.work import Work, run_new, run_new_async
from oncely.middleware.chain import BothWays, CallNext

Metadata = Mapping[str, Any] | Callable[[Message], Mapping[str, Any] | None] | None
"""The metadata of each record, or a function that returns it for a message."""


class Idempotent(BothWays):
    """Calls the rest of the chain once for each message of consumer `name`; a duplicate gets the
    kept result.

    For chains without a Consumer: a Consumer has its own `idempotent`, which claims many messages
    at once. Raises the same errors as a function under `once`, and ConfigError for a wrong ledger,
    name or policy.
    """

    def __init__(
        self, ledger: Ledger, name: str, *, policy: Policy = Policy(), metadata: Metadata = None
    ) -> None:
        self._lifecycle = Lifecycle.under(ledger, name, policy)
        self._metadata = metadata

    def run(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        return run_new(self._work(message), lambda: call_next(message))

    async def run_async(self, message: Message, call_next: CallNext) -> Any:  # noqa: D102
        return await run_new_async(self._work(message), lambda: call_next(message))

    def _work(self, message: Message) -> Work:
        metadata = self._metadata(message) if callable(self._metadata) else self._metadata
        turn = Turn(message.id, fingerprint_of(message.body), message, metadata)
        return Work(self._lifecycle, turn)
