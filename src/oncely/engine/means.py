"""Means: how calls settle commands and get transactions, in a ledger or in an inbox."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from oncely.core.commands import Command, Outcome
from oncely.engine.settle import Settler
from oncely.stores.store import Transaction

T = TypeVar("T")


class SettlingMeans(ABC):
    """What the calls of a ledger, or of an inbox, are built on."""

    @abstractmethod
    def _settle_one(self, command: Command) -> Outcome:
        """The outcome of a single call."""

    @abstractmethod
    def _settle(self, commands: Sequence[Command]) -> Sequence[Outcome]:
        """One outcome for each, in order."""

    def _settle_each(self, commands: Sequence[Command]) -> Sequence[Outcome | Exception]:
        """The same, with an error in the place of an outcome where it concerns that one alone."""
        return self._settle(commands)

    @abstractmethod
    def _transact(self, work: Callable[[Transaction], T]) -> T:
        """What `work` returns, done in one transaction; it may be called again."""

    @property
    @abstractmethod
    def can_defer(self) -> bool:
        """Whether there are transactions. Without them no message waits, and no step is kept."""

    def _settle_in(
        self, transaction: Transaction, commands: Sequence[Command]
    ) -> Sequence[Outcome]:
        """One outcome for each, as a part of a transaction."""
        return Settler(transaction).settle(commands)
