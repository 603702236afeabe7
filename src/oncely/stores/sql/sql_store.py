"""SqlStore: records in one table of a relational database."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from oncely._util.forking import afresh_in_children
from oncely._util.sqlite_files import is_locked
from oncely.core.binding import Binding
from oncely.core.errors import (
    ContentionError,
    KeysLocked,
    ReplyLost,
    StoreError,
    StoreUnavailable,
    mask_passwords,
)
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage, names_for, queue_named
from oncely.stores.names import TableName
from oncely.stores.news import Bell, Hearing, Looking, News, bell_at
from oncely.stores.retrying import TryAgain, patiently
from oncely.stores.sql import binding_rows as queues
from oncely.stores.sql import consumer_rows as consumers
from oncely.stores.sql import record_queries as reading
from oncely.stores.sql import steps
from oncely.stores.sql import waiting_rows as rows
from oncely.stores.sql.access import Access
from oncely.stores.sql.batches import MOST_BYTES, MOST_ROWS
from oncely.stores.sql.database import Database, Fault
from oncely.stores.sql.drivers import is_driver_error
from oncely.stores.sql.engines import database_of, engine_beside
from oncely.stores.sql.record_rows import Pair, by_key, parted
from oncely.stores.sql.revision import is_current
from oncely.stores.sql.sources import check_joined_source
from oncely.stores.sql.sql_inside import SqlInside
from oncely.stores.sql.table import tables
from oncely.stores.store import (
    Backlog,
    Change,
    Clock,
    Horizons,
    Inside,
    Joined,
    KeyRange,
    Listing,
    Loaded,
    Query,
    Records,
    Tally,
    Wanted,
)

T = TypeVar("T")
Item = TypeVar("Item", Record, Pair)


class SqlStore:
    """The tables `name` in the database of an Engine that `engines` made.

    `clock` replaces the database's clock; only tests want that.
    """

    has_transactions = True

    def __init__(
        self, engine: Engine, name: TableName = TableName(), clock: Clock | None = None
    ) -> None:
        self._engine = engine
        self._name = name.checked()
        self._tables = tables(name, engine.dialect.name)
        self._database: Database = database_of(engine)(engine, self._tables, clock)
        self.news = News(*self._told())
        self._looking = Looking(self._newest, self.news)
        self._purged_to: dict[tuple[Query, tuple[State, ...]], str] = {}
        """Where the last batch of each purge ended: the next looks there first."""
        event.listen(engine, "connect", self._database.prepare)
        # As the other, whose pool may be empty, and whose connections are for one thread each.
        self._engine_beside = engine_beside(engine)
        afresh_in_children(self)

    def _told(self) -> tuple[Bell, float, Hearing | None]:
        bell = bell_at(self.place)
        return bell, self._database.look_s, self._database.hearing(bell.ring)

    @property
    def place(self) -> object:
        return self._engine.url, self._name

    # ---- Records -------------------------------------------------------------------------------

    def insert(
        self, records: Sequence[Record], believed: Mapping[str, float | None] | None = None
    ) -> set[Key]:
        def write(at: Access[Connection], batch: Sequence[Record]) -> set[Key]:
            if believed is None:
                return at.database.insert(at.link, batch)
            with at.database.transaction(at.link):
                inside = Access(at.database.inside, at.link)
                return consumers.insert(inside, batch, believed)

        return _all_written(self._write(by_key(records), write))

    def swap(self, changes: Sequence[Change]) -> set[Key]:
        def write(at: Access[Connection], batch: Sequence[Pair]) -> set[Key]:
            return at.database.swap(at.link, batch)

        def remove(at: Access[Connection], batch: Sequence[Record]) -> set[Key]:
            return at.database.remove(at.link, batch)

        kept, gone = parted(changes)
        return _all_written(self._write(kept, write), self._write(gone, remove))

    def load(self, keys: Collection[Key]) -> Loaded:
        return self._read(lambda at: at.database.load(at.link, keys))

    def beside(self) -> Records:
        other = copy(self)
        other._engine = self._engine_beside
        return other

    def scan(self, query: Query) -> Sequence[Record]:
        return self._read(lambda at: reading.longest_unseen(at, query))

    def key_ranges(self, number: int) -> Sequence[KeyRange]:
        return self._read(lambda at: reading.key_ranges(at, number))

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        condition = reading.wanted_of(self._database, keys, wanted)
        last: Key | None = None
        while page := self._read(partial(reading.page, condition, last)):
            yield page
            last = page[-1].key

    def tallies(self) -> Mapping[tuple[str, State], Tally]:
        return self._read(reading.tallies)

    def purge(self, query: Query, states: Sequence[State]) -> int:
        # To remove what is old again is no harm: a lost reply needs no more than another try.
        what = (query, tuple(states))
        begin = self._purged_to.pop(what, "")
        purged, end = self._read(partial(reading.purge, query, states, begin))
        if begin and not purged:
            # Nothing is left after that place.
            purged, end = self._read(partial(reading.purge, query, states, ""))
        if purged == query.limit:
            self._purged_to[what] = end
        if purged < query.limit:
            while self._read(partial(steps.purge, query)) == query.limit:
                pass
        return purged

    # ---- Consumers -----------------------------------------------------------------------------

    def horizons(self, consumers_: Collection[str]) -> Horizons:
        return self._read(lambda at: consumers.horizons(at, consumers_))

    def forget_until(self, horizons: Horizons) -> None:
        self.transaction(lambda inside: inside.forget_until(horizons))

    def keep_retention(self, consumer: str, retention_s: float) -> None:
        def keep(at: Access[Connection]) -> None:
            with at.database.transaction(at.link):
                consumers.keep_retention(at, consumer, retention_s)

        # To write it twice is no harm.
        self._read(keep)

    def retentions(self) -> Mapping[str, float]:
        return self._read(consumers.retentions)

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, work: Callable[[Inside], T]) -> T:
        return patiently(lambda: self._transact(work))

    def within(self, connection: Any) -> AbstractContextManager[Joined]:
        # SQLAlchemy's ORM takes long to import, and so does Alembic: most programs need neither.
        from oncely.stores.sql.joining import joined

        kind = self._engine.dialect.name
        return joined(connection, self._database, kind, self._error_inside)

    def check_joins(self, source: object) -> None:
        check_joined_source(source, self._engine.url, self._name)

    def is_contention(self, error: Exception) -> bool:
        lost = self._fault(error) in (Fault.ROLLED_BACK, Fault.LOCKED, Fault.LOST)
        return lost or isinstance(error, ContentionError) or is_locked(_of_driver(error))

    def is_outage(self, error: Exception) -> bool:
        is_fault = self._fault(error) in (Fault.LOST, Fault.UNAVAILABLE)
        return is_fault or isinstance(error, StoreUnavailable)

    def _transact(self, work: Callable[[Inside], T]) -> T:
        with self._connected() as connection:
            translate = partial(self._translated, connection=connection, lost=TryAgain)
            inside = SqlInside(self._database, connection, translate)
            try:
                with self._database.transaction(connection):
                    done = work(inside)
                    # PostgreSQL would say nothing, and commit nothing.
                    inside.check()
                if inside.has_kept:
                    self.news.tell()
                return done
            except Exception as error:
                # Of the driver there are only those of the beginning and the end.
                if self._fault(error) is None:
                    raise
                raise translate(error) from error
            except BaseException:
                connection.invalidate()
                raise

    # ---- Messages that wait --------------------------------------------------------------------

    def backlogs(self) -> Mapping[str, Backlog]:
        return self._read(rows.backlogs)

    def listed(self, listing: Listing) -> Sequence[WaitingMessage]:
        return self._read(lambda at: rows.listed(at, listing))

    def free_in_s(self, queue: str) -> float | None:
        return self._read(lambda at: rows.free_in_s(at, queue))

    def wait_for_messages(self, timeout_s: float) -> None:
        self._looking.wait(timeout_s)

    # ---- Queues in the database ----------------------------------------------------------------

    def put(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into the queue of that name: all, or none."""
        names = names_for(len(messages))
        weight = sum(len(message.body) for message in messages)
        if self._database.puts and len(messages) <= MOST_ROWS and weight <= MOST_BYTES:
            # Of one statement, which needs no transaction. Whoever does it again finds them there.
            self._read(lambda at: rows.put(at, queue_named(queue), messages, names))
            self.news.tell()
            return
        waiting = WaitingMessage.queued(queue, messages, names)
        self.transaction(lambda inside: inside.keep(waiting))

    def bind(self, bindings: Collection[Binding]) -> None:
        self._change_bindings(queues.bind, bindings)

    def unbind(self, bindings: Collection[Binding]) -> None:
        self._change_bindings(queues.unbind, bindings)

    def _change_bindings(
        self,
        change: Callable[[Access[Connection], Collection[Binding]], None],
        bindings: Collection[Binding],
    ) -> None:
        def work(at: Access[Connection]) -> None:
            with at.database.transaction(at.link):
                change(at, bindings)

        self._read(work)

    def bindings(self, queue: str | None = None) -> Sequence[Binding]:
        return self._read(lambda at: queues.bindings(at, queue))

    def _newest(self) -> int:
        return self._read(rows.newest)

    # ---- Schema --------------------------------------------------------------------------------

    def migrate(self) -> None:
        if self._read(lambda at: is_current(at.link, self._name)):
            return
        from oncely.stores.sql import migrating

        def migrate(at: Access[Connection]) -> None:
            with at.database.migrating(at.link):
                migrating.upgrade(at.link, self._name)

        self._read(migrate)

    def migration_sql(self) -> str:
        from oncely.stores.sql import migrating

        return self._read(lambda at: migrating.upgrade_sql(at.link, self._name))

    def problems(self) -> Sequence[str]:
        from oncely.stores.sql import migrating

        return self._read(lambda at: migrating.drift(at.link, self._name, self._tables))

    def size(self) -> int | None:
        return self._read(lambda at: at.database.size(at.link))

    def close(self) -> None:
        self.news.close()
        for engine in (self._engine, self._engine_beside):
            engine.dispose()

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        self.news.start_afresh()
        for engine in (self._engine, self._engine_beside):
            engine.dispose(close=False)

    # ---- Connections and errors ----------------------------------------------------------------

    def _read(self, work: Callable[[Access[Connection]], T]) -> T:
        """Work that may be done again when nobody knows whether it was."""
        return patiently(lambda: self._once(work, self._database, lost=TryAgain))

    def _write(self, items: Sequence[Item], write: "_Write[Item]") -> "_Written":
        """Work that may not: raises ReplyLost where nobody knows whether it was done."""
        done = _Written(set(), set())
        # One batch after another: what is stored would seem to be another's if it was tried again
        # because of a later one.
        for batch in self._database.batches(items):
            self._write_batch(self._database, batch, write, done)
        return done

    def _write_batch(
        self, on: Database, batch: Sequence[Item], write: "_Write[Item]", done: "_Written"
    ) -> None:
        """Add to `done` what became of a batch. Where somebody holds some of its keys, it is
        written in halves, so that all others are.
        """

        def work(at: Access[Connection]) -> set[Key]:
            with on.hurry(at.link):
                return write(at, batch)

        try:
            done.keys.update(patiently(lambda: self._once(work, on, lost=ReplyLost)))
        except KeysLocked:
            if len(batch) == 1:
                done.locked.add(_key_of(batch[0]))
                return
            # It was waited for them all: those that are free need not wait again.
            middle = len(batch) // 2
            for half in (batch[:middle], batch[middle:]):
                self._write_batch(self._database.hurried, half, write, done)

    def _once(
        self, work: Callable[[Access[Connection]], T], on: Database, *, lost: type[Exception]
    ) -> T:
        with self._connected() as connection:
            try:
                return work(Access(on, connection))
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
        fault = self._fault(error)
        match fault:
            case None:
                return error
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
        return self._error(error, fault)

    def _error_inside(self, error: Exception, fault: Fault) -> Exception:
        """The same inside a transaction that is somebody else's, as its connection is."""
        if fault is Fault.ROLLED_BACK:
            return ContentionError(self._text(error))
        return self._error(error, fault)

    def _error(self, error: Exception, fault: Fault) -> Exception:
        match fault:
            case Fault.NO_TABLE:
                return StoreError(
                    f"the ledger's table {self._name.table} is missing or of an older version; "
                    "call migrate() first, or type: oncely migrate"
                )
            case Fault.LOCKED:
                return KeysLocked(self._text(error))
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


class _Written(NamedTuple):
    """What became of items that were to be written."""

    keys: set[Key]
    locked: set[Key]
    """Somebody's transaction holds these."""


_Write = Callable[[Access[Connection], Sequence[Item]], set[Key]]


def _key_of(item: Record | Pair) -> Key:
    return item.key if isinstance(item, Record) else item[0].key


def _all_written(*parts: _Written) -> set[Key]:
    """The keys that are written. Raises KeysLocked where some could not be."""
    written = {key for part in parts for key in part.keys}
    locked = {key for part in parts for key in part.locked}
    if locked:
        some = ", ".join(repr(key.message_id) for key in sorted(locked)[:3])
        raise KeysLocked(
            f"{some}: somebody's transaction is at work on {len(locked)} keys; ask again later",
            locked,
            written,
        )
    return written


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
