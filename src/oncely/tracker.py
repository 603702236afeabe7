"""MessageTracker: looks up and marks processed messages in the caller's own transaction."""

from collections.abc import Callable
from typing import Any, TypeVar

from oncely.core.commands import Granted, Handled
from oncely.core.errors import ConfigError, DuplicateError
from oncely.core.ids import Id, check_id
from oncely.core.record import Key
from oncely.core.refusals import refusal
from oncely.ledger.ledger import Ledger
from oncely.stores.names import TABLE_NAME
from oncely.stores.open_store import store_around

T = TypeVar("T")


class MessageTracker:
    """The messages of `consumer`, in the database and the transaction of `connection`.

    `connection` is any that `Ledger.transaction` takes, except those of asyncio. Its owner commits.
    The records are in `table`, of `schema` where one is named; a ledger has to migrate it first.
    """

    def __init__(
        self, connection: Any, consumer: str, table: str = TABLE_NAME, schema: str | None = None
    ) -> None:
        if hasattr(connection, "run_sync"):
            raise ConfigError("tracker: this connection is async; use AsyncMessageTracker")
        self._consumer = check_id(consumer, "consumer")
        self._connection = connection
        self._ledger = Ledger(store_around(connection, table, schema))

    def has_processed(self, message_id: Id) -> bool:
        """Whether the message was processed, as far as this transaction sees."""
        with self._ledger.transaction(self._connection) as inbox:
            record = inbox.find(Key(self._consumer, message_id))
        return record is not None and record.is_handled

    def mark_as_processed(self, message_id: Id) -> None:
        """The message is processed, as soon as the transaction commits.

        Where another transaction has marked it too, this waits until that one ends. Raises
        DuplicateError where the message was processed before: roll back what was done for it here;
        the transaction itself is left as it was. Raises BusyError, ExhaustedError or InDoubtError
        where the record of the message is in another state.
        """
        with self._ledger.transaction(self._connection) as inbox:
            outcome = inbox.claim(Key(self._consumer, message_id))
            if isinstance(outcome, Handled):
                raise DuplicateError(f"{message_id!r} was processed before")
            if not isinstance(outcome, Granted):
                raise refusal(outcome)
            inbox.complete(outcome.claim)


class AsyncMessageTracker:
    """A MessageTracker whose calls are coroutines, for an AsyncConnection or AsyncSession."""

    def __init__(
        self, connection: Any, consumer: str, table: str = TABLE_NAME, schema: str | None = None
    ) -> None:
        if not hasattr(connection, "run_sync"):
            raise ConfigError("tracker: this connection is not async; use MessageTracker")
        self._connection = connection
        self._names = (check_id(consumer, "consumer"), table, schema)

    async def has_processed(self, message_id: Id) -> bool:
        """Whether the message was processed, as far as this transaction sees."""
        return await self._run(MessageTracker.has_processed, message_id)

    async def mark_as_processed(self, message_id: Id) -> None:
        """The message is processed, as soon as the transaction commits; raises as the other."""
        await self._run(MessageTracker.mark_as_processed, message_id)

    async def _run(self, call: Callable[[MessageTracker, Id], T], message_id: Id) -> T:
        done: T = await self._connection.run_sync(
            lambda connection: call(MessageTracker(connection, *self._names), message_id)
        )
        return done
