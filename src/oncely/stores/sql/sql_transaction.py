"""SqlTransaction: a SQL store inside one transaction, whoever began it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from oncely.core.cases import Case
from oncely.core.record import Key, Record
from oncely.core.waiting import WaitingMessage
from oncely.stores.sql import consumer_rows as consumers
from oncely.stores.sql import operation_rows as operations
from oncely.stores.sql import steps as finished
from oncely.stores.sql import waiting_rows as rows
from oncely.stores.sql.dialect import AnyTables, Dialect, SqlConnection
from oncely.stores.sql.record_rows import batches, removed
from oncely.stores.store import Believed, Loaded, PutBack

P = ParamSpec("P")
T = TypeVar("T")


def guarded(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A call of a SqlTransaction: after an error, every further call raises the same error."""

    @wraps(call)
    def checked(transaction: "SqlTransaction", /, *args: P.args, **options: P.kwargs) -> T:
        transaction.check()
        try:
            return call(transaction, *args, **options)
        except BaseException as error:
            transaction.error = error
            if isinstance(error, Exception):
                transaction.error = transaction.translate(error)
            if transaction.error is error:
                raise
            raise transaction.error from error

    return checked


class SqlTransaction(AnyTables):
    """The tables of `dialect`, through a connection with an open transaction.

    `translate` turns an error of the driver into one of the Store protocol; any other error it
    returns as it is.
    """

    reads_anew = True
    """Whether the next read sees everything that is committed by now. In our own transactions, each
    statement sees what was committed before it.
    """

    def __init__(
        self,
        dialect: Dialect,
        link: SqlConnection,
        translate: Callable[[Exception], Exception],
    ) -> None:
        super().__init__(dialect.within_transactions, link)
        self.translate = translate
        self.error: BaseException | None = None
        """The error that has ended the transaction."""
        self.has_kept = False
        """Whether messages may be free to take once the transaction has committed."""

    def check(self) -> None:
        """Raise the error that has ended the transaction, where one has."""
        if self.error is not None:
            raise self.error

    # ---- Records -------------------------------------------------------------------------------

    @guarded
    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        if believed is None:
            return self._written(self.dialect.insert, case)

        def insert(_: SqlConnection, part: Case) -> set[Key]:
            return consumers.insert(self, part, believed, reads_anew=self.reads_anew)

        return self._written(insert, case)

    @guarded
    def completed(
        self, consumer: str, message_ids: Collection[str], seen_within_s: float
    ) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for batch in batches(sorted(message_ids)):
            found |= self.dialect.completed(self.link, consumer, batch, seen_within_s)
        return found

    @guarded
    def load(self, keys: Collection[Key]) -> Loaded:
        return self.dialect.load(self.link, keys)

    @guarded
    def look(self, keys: Collection[Key]) -> Mapping[Key, Record]:
        return self.dialect.look(self.link, keys)

    @guarded
    def update(self, case: Case) -> set[Key]:
        return self._written(self.dialect.update, case)

    @guarded
    def delete(self, rows: Sequence[Believed]) -> set[Key]:
        return self._written(self.dialect.delete, removed(rows))

    def _written(self, write: Callable[[SqlConnection, Case], set[Key]], case: Case) -> set[Key]:
        written: set[Key] = set()
        for part in self.dialect.parts(case):
            written |= write(self.link, part)
        return written

    horizons = guarded(consumers.horizons)
    forget_until = guarded(consumers.forget_until)

    # ---- Waiting messages, and steps -----------------------------------------------------------

    @guarded
    def keep(self, messages: Sequence[WaitingMessage], *, renews: bool = False) -> None:
        rows.keep(self, messages, renews=renews)
        self.has_kept = True

    @guarded
    def free(self, messages: Sequence[WaitingMessage]) -> None:
        rows.free(self, messages)
        self.has_kept = True

    @guarded
    def put_back(self, changes: Sequence[PutBack]) -> None:
        rows.put_back(self, changes)
        # Some may be free at once, and others may have waited behind them.
        self.has_kept = True

    @guarded
    def remove_held(self, messages: Sequence[WaitingMessage]) -> set[int]:
        removed = rows.remove_held(self, messages)
        # Messages behind them can be taken now.
        self.has_kept = self.has_kept or not all(map(rows.is_alone, messages))
        return removed

    waiting = guarded(rows.waiting)
    unparented = guarded(rows.unparented)
    numbered = guarded(rows.numbered)
    idle = guarded(rows.idle)
    lanes = guarded(rows.lanes)
    take = guarded(rows.take)
    remove = guarded(rows.remove)
    rename = guarded(rows.rename)
    held = guarded(rows.held)

    forget_steps = guarded(finished.forget_steps)
    steps_of = guarded(finished.steps_of)
    keep_step = guarded(finished.keep_step)
    rename_in_audit = guarded(operations.rename_in_audit)
