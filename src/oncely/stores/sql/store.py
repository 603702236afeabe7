"""SqlStore: records in one table of a relational database."""

import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    and_,
    case,
    event,
    exists,
    func,
    select,
)
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from oncely.core.errors import (
    ContentionError,
    ReplyLost,
    StoreError,
    StoreUnavailable,
    mask_passwords,
)
from oncely.core.record import Key, Record, State
from oncely.sqlite_files import is_locked
from oncely.stores.base import (
    Backlog,
    Change,
    Clock,
    Inside,
    Joined,
    KeyRange,
    Loaded,
    Query,
    Tally,
    Wanted,
)
from oncely.stores.names import TableName
from oncely.stores.retrying import TryAgain, patiently
from oncely.stores.sql import deferred, reading, steps
from oncely.stores.sql.database import Database, Fault, raw_cursor
from oncely.stores.sql.drivers import is_driver_error
from oncely.stores.sql.engines import database_of
from oncely.stores.sql.inside import SqlInside
from oncely.stores.sql.listening import Listening, Looking
from oncely.stores.sql.rows import Pair, by_key, parted
from oncely.stores.sql.table import tables

T = TypeVar("T")


class SqlStore:
    """The tables `name` in the database of an Engine that `engines` made.

    `clock` replaces the database's clock; only tests want that.
    """

    has_transactions = True

    def __init__(
        self, engine: Engine, name: TableName = TableName(), clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._name = name.checked()
        self._tables = tables(name, engine.dialect.name)
        self._table = self._tables.records
        self._database: Database = database_of(engine)(engine, self._tables)
        self._waiting = (
            Listening(self._newest, lambda: patiently(self._listen))
            if engine.dialect.name == "postgresql"
            else Looking(self._newest)
        )
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
            condition = reading.fitting(self._database, query, self._time(connection))
            return reading.longest_unseen(self._database, connection, condition, query.limit)

        return self._read(read)

    def key_ranges(self, number: int) -> Sequence[KeyRange]:
        return self._read(lambda link: reading.key_ranges(self._database, link, number))

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        condition = reading.wanted_of(self._database, keys, wanted)
        last: Key | None = None
        while page := self._read(partial(reading.page, self._database, condition, last)):
            yield page
            last = page[-1].key

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        c = self._table.c
        epoch = self._database.epoch

        def read(connection: Connection) -> Mapping[tuple[str, State], Tally]:
            lease_over = func.count(case((epoch("lease_until") <= self._time(connection), 1)))
            oldest = func.min(epoch("last_processed_at"))
            totals = (func.count(), lease_over, oldest, func.sum(c.duplicates))
            chosen = select(c.provider, c.status, *totals).where(reading.is_known(self._table))
            grouped = chosen.group_by(c.provider, c.status)
            return {
                (consumer, State(status)): Tally(count, over, oldest, int(duplicates))
                for consumer, status, count, over, oldest, duplicates in connection.execute(grouped)
            }

        return self._read(read)

    def purge(self, query: Query, states: Sequence[State]) -> int:
        in_states = self._table.c.status.in_([state.value for state in states])
        of_record, record = self._tables.deferred.c, self._table.c
        nothing_waits = ~exists().where(
            of_record.message_id == record.message_id, of_record.provider == record.provider
        )

        def write(connection: Connection) -> int:
            # To look for what waits, and for steps, costs as much as the rest. What is in these
            # tables from now on is not of messages that were last seen long ago.
            some_wait, some_steps = self._database.has_beside(connection)
            old = reading.fitting(self._database, query, self._time(connection))
            condition = and_(in_states, old)
            if some_wait:
                condition = and_(condition, nothing_waits)
            return self._database.purge(connection, condition, query.limit, steps=some_steps)

        # To remove what is old again is no harm: a lost reply needs no more than another try.
        purged = self._read(write)
        if purged < query.limit:
            while self._read(partial(self._purge_steps, query)) == query.limit:
                pass
        return purged

    def _purge_steps(self, query: Query, connection: Connection) -> int:
        age = query.older_than_s
        before = None if age is None else self._time(connection) - age
        with self._database.transaction(connection):
            return steps.purge(self._database, connection, query.consumer, before, query.limit)

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, work: Callable[[Inside], T]) -> T:
        return patiently(lambda: self._transact(work))

    def within(self, connection: Any) -> AbstractContextManager[Joined]:
        return self._joining(connection)

    @cached_property
    def _joining(self) -> Callable[[Any], AbstractContextManager[Joined]]:
        # SQLAlchemy's ORM takes long to import, and so does Alembic: most programs need neither.
        from oncely.stores.sql.joining import Joining

        return partial(
            Joining,
            database=self._database,
            kind=self._engine.dialect.name,
            clock=self._clock,
            translate=self._error_inside,
        )

    def is_contention(self, error: Exception) -> bool:
        lost = self._fault(error) in (Fault.ROLLED_BACK, Fault.LOST)
        return lost or isinstance(error, ContentionError) or is_locked(_of_driver(error))

    def _transact(self, work: Callable[[Inside], T]) -> T:
        with self._connected() as connection:
            translate = partial(self._translated, connection=connection, lost=TryAgain)
            inside = SqlInside(self._database, connection, self._clock, translate)
            try:
                with self._database.transaction(connection):
                    done = work(inside)
                    # PostgreSQL would say nothing, and commit nothing.
                    inside.check()
                if inside.has_deferred:
                    self._waiting.tell()
                return done
            except Exception as error:
                # Of the driver there are only those of the beginning and the end.
                if self._fault(error) is None:
                    raise
                raise translate(error) from error
            except BaseException:
                connection.invalidate()
                raise

    # ---- Deferred messages ---------------------------------------------------------------------

    def backlog(self) -> Backlog:
        return self._read(lambda link: deferred.backlog(self._database, link, self._time(link)))

    def send_again(self) -> int:
        def write(connection: Connection) -> int:
            with self._database.transaction(connection):
                return deferred.send_again(self._database, connection, self._now())

        # To let them be sent twice is no harm.
        return self._read(write)

    def wait_for_deferred(self, timeout_s: float) -> None:
        self._waiting.wait(timeout_s)

    def _newest(self) -> int:
        return self._read(lambda link: deferred.newest(self._database, link))

    def _listen(self) -> Any:
        """A new connection of the driver that is told what is deferred."""
        connection = self._connect()
        try:
            raw_cursor(connection).execute(f'LISTEN "{self._database.channel}"')
            listening = connection.connection.driver_connection
            # From now on it is not the pool's, which would lend it to others.
            connection.connection.detach()
            return listening
        except Exception as error:
            raise self._translated(error, connection, TryAgain) from error

    # ---- Schema --------------------------------------------------------------------------------

    def migrate(self) -> None:
        from oncely.stores.sql import migrating

        def migrate(connection: Connection) -> None:
            with self._database.migrating(connection):
                migrating.upgrade(connection, self._name)

        self._read(migrate)

    def migration_sql(self) -> str:
        from oncely.stores.sql import migrating

        return self._read(lambda connection: migrating.upgrade_sql(connection, self._name))

    def problems(self) -> Sequence[str]:
        from oncely.stores.sql import migrating

        return self._read(lambda link: migrating.drift(link, self._name, self._tables))

    def size(self) -> int | None:
        return self._read(self._database.size)

    def close(self) -> None:
        self._waiting.close()
        self._engine.dispose()

    def start_afresh(self) -> None:
        """Leave connections and locks to the parent: called in a forked child."""
        self._database.start_afresh()
        self._waiting.start_afresh()
        self._engine.dispose(close=False)

    # ---- Connections and errors ----------------------------------------------------------------

    def _now(self) -> float | None:
        return None if self._clock is None else self._clock()

    def _time(self, connection: Connection) -> float:
        return self._database.now(connection, self._now())

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
        connection = self._connect()
        try:
            yield connection
        finally:
            _give_back(connection)

    def _connect(self) -> Connection:
        try:
            return self._engine.connect()
        except PoolTimeout as error:
            raise StoreUnavailable(self._text(error)) from error
        except Exception as error:
            fault = self._fault(error)
            if fault in (Fault.LOST, Fault.UNAVAILABLE):
                raise TryAgain(self._text(error)) from error
            raise StoreError(self._text(error)) from error

    def _translated(
        self, error: Exception, connection: Connection, lost: type[Exception]
    ) -> Exception:
        """The error that the Store protocol promises, for this one from the driver."""
        match self._fault(error):
            case None:
                return error
            case Fault.ROLLED_BACK:
                return TryAgain(self._text(error))
            case Fault.LOST:
                connection.invalidate()
                # The others of the pool are not likely to have lived on.
                self._engine.dispose()
                return lost(self._text(error))
            case Fault.UNAVAILABLE as fault:
                # After a failover another server may answer at the same address.
                connection.invalidate()
                return self._error(error, fault)
            case fault:
                return self._error(error, fault)

    def _error_inside(self, error: Exception, fault: Fault) -> Exception:
        """The same inside a transaction that is somebody else's, as its connection is."""
        match fault:
            case Fault.ROLLED_BACK:
                return ContentionError(self._text(error))
            case _:
                return self._error(error, fault)

    def _error(self, error: Exception, fault: Fault) -> Exception:
        match fault:
            case Fault.NO_TABLE:
                return StoreError(
                    f"the ledger's table {self._name.table} is missing or of an older version; "
                    "call migrate() first, or type: oncely migrate"
                )
            case Fault.LOST | Fault.UNAVAILABLE:
                return StoreUnavailable(self._text(error))
            case _:
                return StoreError(self._text(error))

    def _fault(self, error: Exception) -> Fault | None:
        """What an error means; None where it is not the driver's."""
        of_driver = _of_driver(error)
        return self._database.fault(of_driver) if is_driver_error(of_driver) else None

    def _text(self, error: Exception) -> str:
        # One line: what a driver adds are hints and positions in our statements.
        first_line = str(_of_driver(error)).partition("\n")[0]
        # A password may stand among the URL's options as well.
        return mask_passwords(f"{self._engine.url!r}: {first_line}")


def _of_driver(error: Exception) -> Exception:
    """The driver's own error, where SQLAlchemy or Django has put it into one of theirs."""
    original: BaseException | None = None
    if isinstance(error, DBAPIError):
        original = error.orig
    elif type(error).__module__ == "django.db.utils":
        original = error.__cause__
    return original if isinstance(original, Exception) else error


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
