"""SqlStore: records in one table of a relational database."""

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, and_, case, event, func, select, true
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from oncely.core.errors import ReplyLost, StoreError, StoreUnavailable, mask_passwords
from oncely.core.record import Key, Record, State
from oncely.stores.base import Change, Clock, Loaded, Query, Tally
from oncely.stores.names import TableName
from oncely.stores.retrying import TryAgain, patiently
from oncely.stores.sql import migrating
from oncely.stores.sql.database import Database, Fault
from oncely.stores.sql.engines import database_of
from oncely.stores.sql.rows import Pair, by_key, parted, record_of
from oncely.stores.sql.table import processed_messages

T = TypeVar("T")


class SqlStore:
    """The table `name` in the database of an Engine that `engines` made.

    `clock` replaces the database's clock; only tests want that.
    """

    def __init__(
        self, engine: Engine, name: TableName = TableName(), clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._name = name.checked()
        self._table = processed_messages(name, engine.dialect.name)
        self._database: Database = database_of(engine)(engine, self._table)
        event.listen(engine, "connect", self._database.prepare)
        _start_afresh_after_fork(self)

    # ---- Records -------------------------------------------------------------------------------

    def insert(self, records: Sequence[Record]) -> set[Key]:
        def write(connection: Connection, batch: Sequence[Record]) -> set[Key]:
            return self._database.insert(connection, batch, self._now())

        return self._write(by_key(records), write)

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        def write(connection: Connection, batch: Sequence[Pair]) -> set[Key]:
            return self._database.swap(connection, batch, self._now())

        kept, gone = parted(changes)
        return self._write(kept, write) | self._write(gone, self._database.remove)

    def load(self, keys: Collection[Key]) -> Loaded:
        return self._read(lambda link: self._database.load(link, keys, self._now()))

    def scan(self, query: Query) -> Sequence[Record]:
        def read(connection: Connection) -> Sequence[Record]:
            chosen = select(*self._database.loaded()).select_from(self._table)
            oldest = chosen.where(self._fitting(query, self._time(connection))).order_by(
                self._table.c.last_processed_at, self._table.c.id
            )
            rows = connection.execute(oldest.where(self._is_known()).limit(query.limit))
            return [record_of(tuple(row)) for row in rows]

        return self._read(read)

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        c = self._table.c
        epoch = self._database.epoch

        def read(connection: Connection) -> Mapping[tuple[str, State], Tally]:
            lease_over = func.count(case((epoch("lease_until") <= self._time(connection), 1)))
            oldest = func.min(epoch("last_processed_at"))
            totals = (func.count(), lease_over, oldest, func.sum(c.duplicates))
            chosen = select(c.provider, c.status, *totals).where(self._is_known())
            grouped = chosen.group_by(c.provider, c.status)
            return {
                (consumer, State(status)): Tally(count, over, oldest, int(duplicates))
                for consumer, status, count, over, oldest, duplicates in connection.execute(grouped)
            }

        return self._read(read)

    def purge(self, query: Query, states: Sequence[State]) -> int:
        in_states = self._table.c.status.in_([state.value for state in states])

        def write(connection: Connection) -> int:
            condition = and_(in_states, self._fitting(query, self._time(connection)))
            return self._database.purge(connection, condition, query.limit)

        # To remove what is old again is no harm: a lost reply needs no more than another try.
        return self._read(write)

    # ---- Schema --------------------------------------------------------------------------------

    def migrate(self) -> None:
        def migrate(connection: Connection) -> None:
            with self._database.migrating(connection):
                migrating.upgrade(connection, self._name)

        self._read(migrate)

    def migration_sql(self) -> str:
        return self._read(lambda connection: migrating.upgrade_sql(connection, self._name))

    def problems(self) -> Sequence[str]:
        return self._read(lambda link: migrating.drift(link, self._name, self._table))

    def size(self) -> int | None:
        return self._read(self._database.size)

    def close(self) -> None:
        self._engine.dispose()

    def start_afresh(self) -> None:
        """Leave connections and locks to the parent: called in a forked child."""
        self._database.start_afresh()
        self._engine.dispose(close=False)

    # ---- Parts of queries ----------------------------------------------------------------------

    def _fitting(self, query: Query, now: float) -> ColumnElement[bool]:
        c = self._table.c
        epoch = self._database.epoch
        conditions: list[ColumnElement[bool]] = [true()]
        if query.consumer is not None:
            conditions.append(c.provider == query.consumer)
        if query.state is not None:
            conditions.append(c.status == query.state.value)
        if query.text is not None:
            conditions.append(self._database.holds_text(query.text))
        if query.lease_over:
            conditions.append(epoch("lease_until") <= now)
        if query.older_than_s is not None:
            conditions.append(epoch("last_processed_at") < now - query.older_than_s)
        return and_(*conditions)

    def _is_known(self) -> ColumnElement[bool]:
        """Rows with a status that ours is none of are somebody else's."""
        return self._table.c.status.in_([state.value for state in State])

    def _now(self) -> float | None:
        return None if self._clock is None else self._clock()

    def _time(self, connection: Connection) -> float:
        return self._database.now(connection, self._now())

    # ---- Connections and errors ----------------------------------------------------------------

    def _read(self, work: Callable[[Connection], T]) -> T:
        """Work that may be done again when nobody knows whether it was."""
        return patiently(lambda: self._once(work, lost=TryAgain))

    def _write(
        self, items: Sequence[T], work: Callable[[Connection, Sequence[T]], set[Key]]
    ) -> set[Key]:
        """Work that may not: raises ReplyLost where nobody knows whether it was done."""

        def once(batch: Sequence[T]) -> set[Key]:
            return self._once(lambda link: work(link, batch), lost=ReplyLost)

        # One batch after another: what is stored would seem to be another's if it was tried again
        # because of a later one.
        batches = self._database.batches(items)
        return {key for batch in batches for key in patiently(partial(once, batch))}

    def _once(self, work: Callable[[Connection], T], *, lost: type[Exception]) -> T:
        with self._connected() as connection:
            try:
                return work(connection)
            except BaseException as error:
                if not isinstance(error, Exception) or self._fault(error) is None:
                    # Broken off, anywhere: a transaction may be open, and is not the next one's.
                    connection.invalidate()
                    raise
                raise self._translated(error, connection, lost) from error

    @contextmanager
    def _connected(self) -> Iterator[Connection]:
        try:
            connection = self._engine.connect()
        except PoolTimeout as error:
            raise StoreUnavailable(self._text(error)) from error
        except Exception as error:
            fault = self._fault(error)
            if fault in (Fault.LOST, Fault.UNAVAILABLE):
                raise TryAgain(self._text(error)) from error
            raise StoreError(self._text(error)) from error
        try:
            yield connection
        finally:
            _give_back(connection)

    def _translated(
        self, error: Exception, connection: Connection, lost: type[Exception]
    ) -> Exception:
        """The error that the Store protocol promises, for this one from the driver."""
        match self._fault(error):
            case Fault.NO_TABLE:
                return StoreError(
                    f"the ledger's table {self._name.table} is missing or of an older version; "
                    "call migrate() first, or type: oncely migrate"
                )
            case Fault.ROLLED_BACK:
                return TryAgain(self._text(error))
            case Fault.LOST:
                connection.invalidate()
                # The others of the pool are not likely to have lived on.
                self._engine.dispose()
                return lost(self._text(error))
            case Fault.UNAVAILABLE:
                # After a failover another server may answer at the same address.
                connection.invalidate()
                return StoreUnavailable(self._text(error))
            case _:
                return StoreError(self._text(error))

    def _fault(self, error: Exception) -> Fault | None:
        """What an error means; None where it is not the driver's."""
        driver_error = error.orig if isinstance(error, DBAPIError) else error
        if isinstance(driver_error, self._engine.dialect.loaded_dbapi.Error):
            return self._database.fault(driver_error)
        return None

    def _text(self, error: Exception) -> str:
        driver_error = error.orig if isinstance(error, DBAPIError) else error
        # One line: what a driver adds are hints and positions in our statements.
        first_line = str(driver_error).partition("\n")[0]
        # A password may stand among the URL's options as well.
        return mask_passwords(f"{self._engine.url!r}: {first_line}")


def _give_back(connection: Connection) -> None:
    # What was to be done on it is done, or has failed: that it is lost now changes nothing.
    with suppress(SQLAlchemyError):
        connection.close()


def _start_afresh_after_fork(store: SqlStore) -> None:
    reference = weakref.ref(store)

    def start_afresh() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.start_afresh()

    os.register_at_fork(after_in_child=start_afresh)
