"""SqlStore: records in one table of a relational database."""

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from copy import copy
from functools import partial, wraps
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from oncely._util import clock
from oncely._util.forking import afresh_in_children
from oncely._util.sqlite_files import is_locked
from oncely._util.tls import advice
from oncely.core.cases import Case
from oncely.core.errors import (
    ContentionError,
    KeysLocked,
    ReplyLost,
    StoreDenied,
    StoreError,
    StoreUnavailable,
    mask_passwords,
)
from oncely.core.message import Message
from oncely.core.record import Key, Record, State
from oncely.core.waiting import WaitingMessage, names_for, queue_named
from oncely.stores.names import Program, TableName, in_words
from oncely.stores.notifications import Notifications, signal_in
from oncely.stores.retrying import TryAgain, patiently
from oncely.stores.sql import consumer_rows as consumers
from oncely.stores.sql import operation_rows as operations
from oncely.stores.sql import record_queries as reading
from oncely.stores.sql import steps
from oncely.stores.sql import waiting_rows as rows
from oncely.stores.sql.dialect import ConnectedTables, Dialect, Fault, OwnTables
from oncely.stores.sql.drivers import is_driver_error, is_raised_by_driver, of_driver
from oncely.stores.sql.engines import check_joined_source, dialect_of, engine_beside, renew
from oncely.stores.sql.privileges import WRITES, needed
from oncely.stores.sql.record_rows import MOST_BYTES, MOST_ROWS, removed
from oncely.stores.sql.revision import is_current
from oncely.stores.sql.sql_transaction import SqlTransaction
from oncely.stores.sql.table import tables
from oncely.stores.store import (
    Believed,
    CallersTransaction,
    Clock,
    Horizons,
    KeyRange,
    Listing,
    Loaded,
    Query,
    Records,
    Tally,
    Transaction,
    Wanted,
)

_MIGRATION_PATIENCE_S = 600.0
"""How long a migration tries to get the locks that it needs."""
_MIGRATION_PAUSE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")


def _reading(
    work: Callable[Concatenate[OwnTables, P], T],
) -> Callable[Concatenate["SqlStore", P], T]:
    """A call of the store: that work, which may be repeated."""

    @wraps(work)
    def call(store: "SqlStore", /, *args: P.args, **options: P.kwargs) -> T:
        return store._read(work, *args, **options)

    return call


def _changing(
    work: Callable[Concatenate[OwnTables, P], T],
) -> Callable[Concatenate["SqlStore", P], T]:
    """The same in a transaction. Doing it twice does no harm."""

    @wraps(work)
    def change(at: OwnTables, /, *args: P.args, **options: P.kwargs) -> T:
        with at.dialect.transaction(at.link):
            return work(at, *args, **options)

    return _reading(change)


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
        self._dialect: Dialect = dialect_of(engine)(engine, self._tables, clock)
        signal, poll_s = signal_in(self.database_id), self._dialect.poll_s
        self.notifications = Notifications(signal, poll_s, self._dialect.listener(signal.send))
        self._newest_seen = 0
        """The highest number of any message in the last wait for messages."""
        self._purged_to: dict[tuple[Query, tuple[State, ...]], str] = {}
        """Where the last batch of each purge ended: the next looks there first."""
        event.listen(engine, "connect", self._dialect.prepare)
        # A second pool, since all connections of the first may be in use.
        self._engine_beside = engine_beside(engine)
        self._file = engine.url.database if engine.dialect.name == "sqlite" else None
        self._first_file: tuple[int, int] | None = None
        """Which file that was, when it was first used."""
        afresh_in_children(self)

    @property
    def counts_quickly(self) -> bool:
        return self._dialect.samples

    @property
    def batches_at_once(self) -> int:
        return self._dialect.batches_at_once

    @property
    def database_id(self) -> object:
        return self._engine.url, self._name

    # ---- Records -------------------------------------------------------------------------------

    def insert(self, case: Case, believed: Mapping[str, float | None] | None = None) -> set[Key]:
        if believed is None:
            return self._write(self._dialect.insert, case)
        return self._write(self._insert_believing, case, believed)

    def _insert_believing(
        self, connection: Connection, case: Case, believed: Mapping[str, float | None]
    ) -> set[Key]:
        with self._dialect.transaction(connection):
            inside = ConnectedTables(self._dialect.within_transactions, connection)
            return consumers.insert(inside, case, believed)

    def update(self, case: Case) -> set[Key]:
        return self._write(self._dialect.update, case)

    def delete(self, rows: Sequence[Believed]) -> set[Key]:
        return self._write(self._dialect.delete, removed(rows))

    def load(self, keys: Collection[Key]) -> Loaded:
        try:
            return patiently(self._once, self._dialect.load, keys, lost=TryAgain)
        except KeysLocked as error:
            # Rows are read whoever holds them: it is the table that is locked.
            raise KeysLocked(str(error), {*keys}) from error

    def beside(self) -> Records:
        other = copy(self)
        other._engine = self._engine_beside
        return other

    scan = _reading(reading.scan)
    of_message = _reading(reading.of_message)
    claimed_by = _reading(reading.claimed_by)
    claims_of = _reading(reading.claims_of)
    window = _reading(reading.window)
    key_ranges = _reading(reading.key_ranges)

    def read(self, keys: KeyRange, wanted: Wanted) -> Iterator[Sequence[Record]]:
        condition = reading.wanted_of(self._dialect, keys, wanted)
        last: Key | None = None
        while page := self._read(reading.page, condition, last):
            yield page
            last = page[-1].key

    def tallies(self, most: int | None = None) -> Mapping[tuple[str, State], Tally]:
        if most is None:
            return self._read(reading.tallies)
        return self._read(reading.estimates, most)

    def purge(self, query: Query, states: Sequence[State]) -> int:
        # Removing old records again does no harm: after a lost reply, another try is enough.
        what = (query, tuple(states))
        begin = self._purged_to.pop(what, "")
        purged, end = self._read(reading.purge, query, states, begin)
        if begin and not purged:
            # Nothing is left after that place.
            purged, end = self._read(reading.purge, query, states, "")
        if purged == query.limit:
            self._purged_to[what] = end
        if purged < query.limit:
            while self._read(steps.purge, query) == query.limit:
                pass
        return purged

    # ---- Consumers -----------------------------------------------------------------------------

    horizons = _reading(consumers.horizons)
    keep_retention = _changing(consumers.keep_retention)
    retentions = _reading(consumers.retentions)

    def forget_until(self, horizons: Horizons) -> None:
        self.transaction(lambda transaction: transaction.forget_until(horizons))

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, work: Callable[[Transaction], T]) -> T:
        done: T = patiently(self._once, self._transact, work, lost=TryAgain, undone=Exception)
        return done

    def within(self, connection: Any) -> AbstractContextManager[CallersTransaction]:
        if self._file is not None:
            self._check_file(self._file)
        # SQLAlchemy's ORM takes long to import, and so does Alembic: most programs need neither.
        from oncely.stores.sql.joining import joined

        kind = self._engine.dialect.name
        return joined(connection, self._dialect, kind, partial(self._error, is_joined=True))

    def check_joins(self, source: object) -> None:
        check_joined_source(source, self._engine.url, self._name)

    def is_contention(self, error: Exception) -> bool:
        passing = (Fault.ROLLED_BACK, Fault.LOCKED, Fault.LOST, Fault.READ_ONLY)
        has_lost = self._fault(error) in passing
        return has_lost or isinstance(error, ContentionError) or is_locked(of_driver(error))

    def is_outage(self, error: Exception) -> bool:
        is_fault = self._fault(error) in (Fault.LOST, Fault.READ_ONLY, Fault.UNAVAILABLE)
        return is_fault or isinstance(error, StoreUnavailable)

    def _transact(self, connection: Connection, work: Callable[[Transaction], T]) -> T:
        def translate(error: Exception) -> Exception:
            fault = self._fault(error)
            return error if fault is None else self._translated(error, fault, connection, TryAgain)

        transaction = SqlTransaction(self._dialect, connection, translate)
        with self._dialect.transaction(connection):
            done = work(transaction)
            # After an error, PostgreSQL's COMMIT would roll back without raising.
            transaction.check()
        if transaction.has_kept:
            self.notifications.signal.send()
        return done

    # ---- Messages that wait --------------------------------------------------------------------

    backlogs = _reading(rows.backlogs)
    free_in_s = _reading(rows.free_in_s)
    _newest = _reading(rows.newest)

    def listed(self, listing: Listing) -> Iterator[WaitingMessage]:
        queues = self._read(lambda at: rows.queues(at, listing.queue))
        found = (self._listed_in(queue, listing) for queue in queues)
        in_order = merge(*found, key=attrgetter("held_until", "number"))
        return (each.message for each in islice(in_order, listing.limit))

    _page = _reading(rows.page)

    def _listed_in(self, queue: str, listing: Listing) -> Iterator[rows.Listed]:
        after: rows.Listed | None = None
        while page := self._page(queue, listing, after):
            yield from page
            after = page[-1]

    def wait_for_messages(self, timeout_s: float) -> None:
        deadline = clock.monotonic() + timeout_s
        told = now_told = self.notifications.signal.count
        while True:
            newest, seen = self._newest(), self._newest_seen
            self._newest_seen = newest
            left_s = deadline - clock.monotonic()
            if newest > seen or now_told != told or left_s <= 0:
                return
            now_told = self.notifications.wait(told, left_s)

    # ---- Queues in the database ----------------------------------------------------------------

    def put(self, queue: str, messages: Sequence[Message]) -> None:
        """Put messages into the queue of that name: all, or none."""
        names = names_for(len(messages))
        weight = sum(len(message.body) for message in messages)
        if self._dialect.puts and len(messages) <= MOST_ROWS and weight <= MOST_BYTES:
            # One statement needs no transaction. A repeated one finds the rows there already.
            self._read(lambda at: rows.put(at, queue_named(queue), messages, names))
            self.notifications.signal.send()
            return
        waiting = WaitingMessage.queued(queue, messages, names)
        self.transaction(lambda transaction: transaction.keep(waiting))

    bind = _changing(consumers.bind)
    bindings = _reading(consumers.bindings)

    # ---- For operators -------------------------------------------------------------------------

    keeps_operations = True

    keep_worker = _changing(operations.keep_worker)
    end_worker = _changing(operations.end_worker)
    workers = _reading(operations.workers)
    activity = _reading(operations.activity)
    keep_run = _changing(operations.keep_run)
    runs = _reading(operations.runs)
    note = _changing(operations.note)
    note_counts = _changing(operations.note_counts)
    audit = _reading(operations.audit)
    purge_operations = _changing(operations.purge)
    purge_audit = _changing(operations.purge_audit)

    # ---- Schema --------------------------------------------------------------------------------

    def migrate(self) -> None:
        until = clock.monotonic() + _MIGRATION_PATIENCE_S
        while True:
            try:
                if not self._read(lambda at: is_current(at.link, self._name)):
                    from oncely.stores.sql import migrating

                    self._read(lambda at: migrating.upgrade(at, self._name))
                return
            except KeysLocked as error:
                if clock.monotonic() > until:
                    raise StoreUnavailable(
                        f"{self._name.table} cannot be migrated, since other programs have had it "
                        f"locked for {_MIGRATION_PATIENCE_S:.0f} s: {error}"
                    ) from error
            # Whoever came meanwhile has waited behind the migration, and goes first.
            clock.sleep(_MIGRATION_PAUSE_S)

    def migration_sql(self) -> str:
        from oncely.stores.sql import migrating

        return self._read(lambda at: migrating.upgrade_sql(at.link, self._name))

    def problems(self, program: Program = "worker") -> Sequence[str]:
        from oncely.stores.sql import migrating

        # A role does not see what it may not read.
        if grants := self.grants(program):
            lacks = f"The role of this ledger lacks what {in_words(program)} needs; type:"
            return [f"{lacks} {grant}" for grant in grants]

        def found(at: OwnTables) -> Sequence[str]:
            drift = migrating.drift(at.link, self._name, self._tables)
            return [*drift, *at.dialect.unsafe_settings(at.link)]

        return self._read(found)

    def grants(self, program: Program) -> Sequence[str]:
        wanted = needed([program], self._tables, self._name)
        return self._read(lambda at: at.dialect.grants(at.link, wanted))

    def size(self) -> int | None:
        return self._read(lambda at: at.dialect.size(at.link))

    def close(self) -> None:
        self.notifications.close()
        for engine in (self._engine, self._engine_beside):
            renew(engine)

    def start_afresh(self) -> None:
        """Leave connections to the parent: called in a forked child."""
        self.notifications.start_afresh()
        for engine in (self._engine, self._engine_beside):
            engine.dispose(close=False)

    # ---- Connections and errors ----------------------------------------------------------------

    def _read(
        self,
        work: Callable[Concatenate[OwnTables, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """Work that may be repeated when nobody knows whether it was done."""

        def read(connection: Connection) -> T:
            return work(ConnectedTables(self._dialect, connection), *args, **options)

        return patiently(self._once, read, lost=TryAgain)

    def _write(self, write: Callable[..., set[Key]], case: Case, *more: Any) -> set[Key]:
        """The keys that are written by work that must not be repeated: raises ReplyLost where it
        may have been done, or not, and KeysLocked where some keys are locked.
        """
        written: set[Key] = set()
        locked: set[Key] = set()
        # One part after another: if an earlier part was repeated because of a later one, its own
        # rows would look as if another worker had written them.
        for part in self._dialect.parts(case):
            try:
                written |= patiently(self._once, write, part, *more, lost=ReplyLost)
            except KeysLocked:
                if len(part.rows) > 1 and self._is_table_locked():
                    locked.update(row[0] for row in part.rows)
                else:
                    self._write_halves(write, part, more, written, locked)
        if locked:
            some = ", ".join(repr(key.message_id) for key in sorted(locked)[:3])
            raise KeysLocked(
                f"{some}: records locked by another transaction: {len(locked)}; ask again later",
                locked,
                written,
            )
        return written

    def _write_halves(
        self,
        write: Callable[..., set[Key]],
        part: Case,
        more: Sequence[Any],
        written: set[Key],
        locked: set[Key],
    ) -> None:
        """Write a part of which another transaction has locked some keys: in halves, so that all
        other keys are written.
        """
        middle = len(part.rows) // 2
        if not middle:
            locked.add(part.rows[0][0])
            return
        for which in (slice(middle), slice(middle, None)):
            half = part._replace(rows=part.rows[which])
            try:
                # The whole part has waited for the locks: the halves hardly wait.
                written |= patiently(
                    self._once, write, half, *more, lost=ReplyLost, is_hurried=True
                )
            except KeysLocked:
                self._write_halves(write, half, more, written, locked)

    def _is_table_locked(self) -> bool:
        """Whether nothing can be written to the table now, whatever its key."""
        nothing = f"UPDATE {self._dialect.name} SET version = version WHERE false"
        try:
            patiently(self._once, self._dialect.run, nothing, lost=TryAgain, is_hurried=True)
        except KeysLocked:
            return True
        return False

    def _once(
        self,
        work: Callable[..., T],
        *args: Any,
        lost: type[Exception],
        is_hurried: bool = False,
        undone: type[Exception] | tuple[()] = (),
    ) -> T:
        """What `work` returns, on a connection of the pool. `lost` is raised where that is lost.
        After an error that is `undone`, no transaction is open.
        """
        pool = self._engine.pool
        try:
            connection = self._engine.connect()
        except Exception as error:
            raise self._unconnected(error) from error
        try:
            if self._file is not None:
                self._check_file(self._file)
            if not is_hurried:
                return work(connection, *args)
            with self._dialect.hurried(connection):
                return work(connection, *args)
        except BaseException as error:
            if isinstance(error, Exception) and (fault := self._fault(error)) is not None:
                raise self._translated(error, fault, connection, lost) from error
            if not isinstance(error, undone):
                # Broken off anywhere: a transaction may be open, which must not reach the next user
                # of the connection.
                connection.invalidate()
            raise
        finally:
            # The work on it is done, or has failed: if it is lost now, that changes nothing.
            try:  # noqa: SIM105 - cheaper than `suppress`.
                connection.close()
            except SQLAlchemyError:
                pass
            if self._engine.pool is not pool:
                # Disposed of meanwhile, by a thread that lost its connection or closed the ledger:
                # nobody else would close what is given back to it.
                pool.dispose()

    def _check_file(self, file: str) -> None:
        """Raise StoreError where it is not the file that was used first: what is written to one
        that is removed, nobody else sees.
        """
        try:
            at = os.stat(file)  # noqa: PTH116 - often.
            found = at.st_dev, at.st_ino
        except OSError:
            found = None
        self._first_file = self._first_file or found
        if found != self._first_file:
            raise StoreError(
                f"{self._engine.url!r}: the file was removed or replaced while this process had it "
                "open; restart the process, and copy a ledger by VACUUM INTO"
            )

    def _unconnected(self, error: Exception) -> Exception:
        """The error for this one of connecting; what a signal handler has raised is raised."""
        if isinstance(error, PoolTimeout):
            return StoreUnavailable(self._text(error))
        fault = self._fault(error)
        if fault is None and not is_raised_by_driver(error):
            raise error
        told = advice(error, self._engine.dialect.name)
        text = f"{self._text(error)}{told}"
        if fault is Fault.DENIED:
            return StoreDenied(f"{text}; {self._dialect.denied}")
        if fault not in (Fault.LOST, Fault.UNAVAILABLE):
            return StoreError(text)
        # What TLS has refused, it would refuse again.
        return (StoreUnavailable if told and "EOF" not in told else TryAgain)(text)

    def _translated(
        self, error: Exception, fault: Fault, connection: Connection, lost: type[Exception]
    ) -> Exception:
        """The Store protocol's error for this one of the driver."""
        match fault:
            case Fault.ROLLED_BACK:
                return TryAgain(self._text(error))
            case Fault.LOST | Fault.READ_ONLY:
                connection.invalidate()
                # The other connections of the pool are probably of no use either.
                renew(self._engine)
                return (lost if fault is Fault.LOST else TryAgain)(self._text(error))
            case Fault.UNAVAILABLE:
                # After a failover another server may answer at the same address.
                connection.invalidate()
        return self._error(error, fault)

    def _error(self, error: Exception, fault: Fault, *, is_joined: bool = False) -> Exception:
        """The same, where the connection stays; it `is_joined` where it is a caller's."""
        text = self._text(error)
        match fault:
            case Fault.ROLLED_BACK:
                return ContentionError(text)
            case Fault.NO_TABLE:
                # The ledger's own database may have the table that a caller's lacks.
                elsewhere = " in the database of this transaction; open the ledger on that database"
                what_to_do = f"{elsewhere}, and" if is_joined else "; call migrate() first, or"
                return StoreError(
                    f"the ledger's table {self._name.table} is missing or of an older version"
                    f"{what_to_do} type: oncely migrate"
                )
            case Fault.LOCKED:
                return KeysLocked(text)
            case Fault.LOST | Fault.READ_ONLY | Fault.UNAVAILABLE:
                return StoreUnavailable(text)
            case Fault.DENIED:
                # The role of a caller's transaction is not that of the ledger.
                return StoreDenied(
                    f"{text}; {self._dialect.denied if is_joined else self._denied(text)}"
                )
            case _:
                return StoreError(text)

    def _denied(self, text: str) -> str:
        """What to type after an error with that text."""
        wanted = needed(WRITES, self._tables, self._name)
        # Or of the sequence that numbers its rows.
        on_these = [each for each in wanted if re.search(rf"\b{each[1].name}(_\w+_seq)?\b", text)]
        # On another connection: on this one the transaction has failed.
        with suppress(Exception), closing(self._engine_beside.connect()) as connection:
            grants = self._dialect.grants(connection, on_these)
            if grants:
                return f"type: {'; '.join(grants)}"
            return self._dialect.to_migrate
        return self._dialect.denied

    def _fault(self, error: Exception) -> Fault | None:
        """What an error means; None where it is not the driver's."""
        original = of_driver(error)
        return self._dialect.fault(original) if is_driver_error(original) else None

    def _text(self, error: Exception) -> str:
        # One line: the lines after it are hints, and positions in our statements.
        first_line = str(of_driver(error)).partition("\n")[0]
        # The URL's options may hold a password as well.
        return mask_passwords(f"{self._engine.url!r}: {first_line}")
