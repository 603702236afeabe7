"""What differs between databases; everything else of the SQL store is the same for all."""

import json
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    cast,
)

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    literal_column,
    select,
)

from oncely._util.chance import CHANCE
from oncely._util.clock import moved_time
from oncely.core.cases import Case, Row
from oncely.core.record import Key, Record, State
from oncely.stores.sql.record_rows import (
    LOADED,
    RENEWED,
    Columns,
    batches,
    record_of,
)
from oncely.stores.sql.table import SqlTables
from oncely.stores.store import Clock, Loaded

if TYPE_CHECKING:
    from oncely.stores.sql.postgresql_listener import PostgresqlListener

_MOST_SAMPLES = 400
"""SQLite takes at most 500 queries in one UNION."""
HURRIED = "is_hurried"
"""Notes that statements on a connection of ours hardly wait for locks now."""
key_of = itemgetter(0)
"""The key of a row of a case."""


class SqlConnection(Protocol):
    """What statements need of a connection: one of ours has it, and the wrapper of a caller's."""

    @property
    def connection(self) -> Any:
        """Its `cursor()` takes statements and parameters as the driver of our connections does."""

    @property
    def info(self) -> MutableMapping[Any, Any]:
        """Notes about the connection."""


class Fault(Enum):
    """What an error of a driver means."""

    NO_TABLE = auto()
    """The table, or a column of it, does not exist."""
    ROLLED_BACK = auto()
    """Lost against another transaction, and nothing is stored: it may be repeated."""
    LOST = auto()
    """The connection is gone; what was being written may be stored, or not."""
    LOCKED = auto()
    """Another transaction held a lock for longer than we waited; nothing is stored."""
    READ_ONLY = auto()
    """The session cannot write, as after a failover; nothing is stored."""
    DENIED = auto()
    """The session's role lacks a privilege; nothing is stored."""
    UNAVAILABLE = auto()
    """The database can be reached, but does not serve."""
    OTHER = auto()


class Sample(NamedTuple):
    """Rows from all over the table of records."""

    rows: Sequence[tuple[str, str, int]]
    """Consumer, status and duplicates of each."""
    total: float
    """About how many rows the table has."""


class Dialect(ABC):
    """Statements and errors of one kind of database, for one ledger.

    Statements are text that is built once, for raw cursors: SQLAlchemy's own work per row would
    cost more than the database's. `clock` replaces the database's own; only tests want that.

    Where it `is_inside`, its statements are for a transaction that is open already, on a session
    with unknown settings: they neither begin nor end it, and `load` locks what it finds. Else they
    wait a second or two for a lock that another transaction holds.
    """

    clock: ClassVar[str]
    """An expression for the database's clock, in seconds since 1970."""
    position: ClassVar[str]
    """The function that finds a text in a text, character by character."""
    always: ClassVar[str]
    """A time that is long past."""
    insert_absent: ClassVar[str] = "INSERT INTO {} ON CONFLICT DO NOTHING"
    """An insert that leaves existing rows as they are."""
    skip_locked: ClassVar[str]
    """How a query of the table `d` locks its rows, and skips those that others have locked."""
    locked: ClassVar[str]
    """The same, but waits for rows that others have locked."""
    batches_at_once: ClassVar[int] = 2
    """How many batches it works on side by side."""
    denied: ClassVar[str] = "type: oncely check"
    """What tells which privilege is missing."""
    to_migrate: ClassVar[str]
    """What a role needs that lacks nothing for other work."""
    poll_s: ClassVar[float] = 0.2
    """How often to look for messages that others have kept."""

    def __init__(
        self,
        engine: Engine,
        tables: SqlTables,
        clock: Clock | None,
        *,
        is_inside: bool = False,
    ) -> None:
        self._engine = engine
        self.tables = tables
        self._clock = clock
        self.now: Callable[[], float | None] = clock or moved_time
        """The parameter `now`: a time that a test has set, None for the database's own clock."""
        # A batch has one of few shapes, by the columns that differ from row to row.
        self._text: Callable[..., str] = lru_cache(lambda build, *shape: build(*shape))
        self.is_inside = is_inside
        self.table = tables.records
        self.waiting_table = tables.waiting
        self.name_of = name_of = engine.dialect.identifier_preparer.format_table
        self.name = name_of(tables.records)
        self.waiting_name = name_of(tables.waiting)
        self.steps_name = name_of(tables.steps)
        self.consumers_name = name_of(tables.consumers)
        self.bindings_name = name_of(tables.bindings)
        self.audit_name = name_of(tables.audit)

    @cached_property
    def within_transactions(self) -> Self:
        """The same for use inside transactions."""
        return type(self)(self._engine, self.tables, self._clock, is_inside=True)

    @contextmanager
    def hurried(self, link: SqlConnection) -> Iterator[None]:
        """Inside the block, statements on a connection of ours hardly wait for locks."""
        self._hurry(link, is_hurried=True)
        try:
            yield
        except Exception:
            self._hurry(link, is_hurried=False)
            raise
        self._hurry(link, is_hurried=False)

    def _hurry(self, link: SqlConnection, *, is_hurried: bool) -> None:
        link.info[HURRIED] = is_hurried
        if (statement := self.lock_wait(link, is_hurried=is_hurried)) is not None:
            self.run(link, statement)

    def lock_wait(self, link: SqlConnection, *, is_hurried: bool) -> str | None:  # noqa: ARG002
        """The statement that sets how long a session of ours waits for locks; None where no setting
        of the session says that.
        """
        return None

    def prepare(self, connection: Any, _: object) -> None:  # noqa: B027 - not all have to.
        """Make a new connection fit for the ledger."""

    # ---- Records -------------------------------------------------------------------------------

    @abstractmethod
    def insert(self, link: SqlConnection, case: Case) -> set[Key]:
        """Write one of the `parts` of new records as the Store protocol says."""

    @abstractmethod
    def update(self, link: SqlConnection, case: Case) -> set[Key]:
        """Write one of the `parts` of changes as the Store protocol says."""

    @abstractmethod
    def delete(self, link: SqlConnection, case: Case) -> set[Key]:
        """Remove those of one of the `parts` that are unchanged, as the Store protocol says."""

    def parts(self, case: Case) -> Sequence[Case]:
        """A case in parts, each of which is stored whole or not at all, and can be repeated; in the
        same order for all writers, so that none deadlock.
        """
        if len(case.rows) == 1:
            return [case]
        ordered = sorted(case.rows, key=key_of)
        return [case._replace(rows=rows) for rows in self.batches(ordered)]

    def batches(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        """So many of these rows at a time as one of the `parts` may have."""
        return batches(rows)

    def load(self, link: SqlConnection, keys: Collection[Key]) -> Loaded:
        """As the Store protocol says."""
        # Rows that are locked by the read may have the time in them: nobody can extend their leases
        # in between.
        at = None if self.is_inside else self.time(link)
        found: dict[Key, Record] = {}
        for row in self._rows_by_batch(link, keys, locks=self.is_inside):
            record = record_of(self.table, row)
            found[record.key] = record
            if at is None:
                at = float(row[len(LOADED)])
        return Loaded(found, self.time(link) if at is None else at)

    def look(self, link: SqlConnection, keys: Collection[Key]) -> Mapping[Key, Record]:
        """The records that exist, without locking them."""
        rows = self._rows_by_batch(link, keys, locks=False)
        found = (record_of(self.table, row) for row in rows)
        return {record.key: record for record in found}

    def completed(
        self, link: SqlConnection, consumer: str, message_ids: Sequence[str], seen_within_s: float
    ) -> Mapping[str, float]:
        """One of `batches` of messages, as the CallersTransaction protocol says."""
        since = self.time(link) - seen_within_s
        keys = [Key(consumer, message_id) for message_id in message_ids]
        # To make records of the rows would take longer than to read them.
        return {
            message_id: first_seen
            for _, message_id, status, _, _, first_seen, last_seen, *_ in self.rows_of(
                link, keys, locks=False
            )
            if status == State.COMPLETED.value and last_seen > since
        }

    def _rows_by_batch(
        self, link: SqlConnection, keys: Collection[Key], *, locks: bool
    ) -> Iterator[Sequence[Any]]:
        for batch in batches(sorted(keys)):
            yield from self.rows_of(link, batch, locks=locks)

    @abstractmethod
    def rows_of(
        self, link: SqlConnection, keys: Sequence[Key], *, locks: bool
    ) -> Iterable[Sequence[Any]]:
        """The rows of these keys that exist: the columns of `LOADED` and, where it `locks` them,
        one with the time before that.
        """

    @property
    def _ends(self) -> str:
        # SQLite takes the one or the other from the index, and reads all for both together.
        return f"SELECT (SELECT min(id) FROM {self.name}), (SELECT max(id) FROM {self.name})"

    def sample_ids(self, link: SqlConnection, number: int) -> Sequence[str]:
        """Message ids from all over the table, in the order of its index: about `number`, or a few
        times as many.
        """
        first, last = self.run(link, self._ends).fetchone()
        if first is None:
            return []
        number = min(number, _MOST_SAMPLES)
        indexes = range(first, last + 1, max(1, -(-(last + 1 - first) // number)))
        nearest = f"(SELECT min(id) FROM {self.name} WHERE id >= {{}})"
        chosen = " UNION ".join(
            f"SELECT message_id FROM {self.name} WHERE id = {nearest.format(index)}"
            for index in indexes
        )
        return [row[0] for row in self.run(link, f"{chosen} ORDER BY message_id").fetchall()]

    samples: ClassVar[bool] = True
    """Whether there is a `sample`, and an index of what is not completed."""

    def sample(self, link: SqlConnection, number: int) -> Sample:
        """About `number` rows from all over the table."""
        first, last = self.run(link, self._ends).fetchone()
        if first is None:
            return Sample([], 0)
        span = last + 1 - first
        chosen = CHANCE.sample(range(first, last + 1), min(number, span))
        ids = ", ".join(map(str, chosen))
        rows = self.run(
            link, f"SELECT provider, status, duplicates FROM {self.name} WHERE id IN ({ids})"
        ).fetchall()
        # Numbers of what was purged are among those that were chosen.
        return Sample(rows, span * len(rows) / len(chosen))

    def purge(
        self,
        connection: Connection,
        condition: ColumnElement[bool],
        limit: int,
        horizon: float,
        *,
        steps: bool,
        after: str,
    ) -> tuple[int, str]:
        """Remove at most `limit` records that fit, in one transaction, with their steps where
        `steps` says that there are any, and raise the horizons of their consumers. It begins after
        a place in the table, "" for its beginning. Return how many records were removed, and the
        place of the last.
        """
        c = self.table.c
        chosen = select(c.id, c.message_id, c.provider).where(condition, c.id > int(after or 0))
        # Rows that another cleaner or a worker has locked are left to it.
        chosen = chosen.order_by(c.id).limit(limit).with_for_update(skip_locked=True)
        with self.transaction(connection):
            found = connection.execute(chosen).all()
            if found:
                keys = [Key(row.provider, row.message_id) for row in found]
                # By key: for many ids MariaDB reads all rows, and waits for any that is locked.
                self.run(connection, self.removal(self.name), self.key_values(sorted(keys)))
                if steps:
                    self.remove_steps(connection, keys)
            raised = self.consumer_written("forgotten_until", only_later=True)
            for consumer in sorted({row.provider for row in found}):
                self.run(connection, raised, {"consumer": consumer, "value": horizon})
        return len(found), str(found[-1].id) if found else after

    def remove_steps(self, link: SqlConnection, keys: Sequence[Key]) -> None:
        """Remove the steps of one of `batches` of messages."""
        self.run(link, self.removal(self.steps_name), self.key_values(sorted(keys)))

    # ---- Consumers -----------------------------------------------------------------------------

    def horizons(
        self,
        link: SqlConnection,
        consumers: Sequence[str],
        *,
        reads_anew: bool = False,  # noqa: ARG002 - where it makes a difference, it is used.
    ) -> Mapping[str, float]:
        """The horizons of those consumers that have one, as they are now, and not as they were when
        the transaction first read. `reads_anew` where it sees the present anyway.
        """
        return self._horizons_of(link, consumers)

    def has_read_nothing(self, link: SqlConnection) -> bool:  # noqa: ARG002 - for one that has to ask.
        """Whether a transaction has surely read nothing yet, so that its next read sees everything
        that is committed by now. False where that is not known, or makes no difference.
        """
        return False

    def _horizons_of(
        self, link: SqlConnection, consumers: Sequence[str], lock: str = ""
    ) -> Mapping[str, float]:
        names = {f"c{n}": consumer for n, consumer in enumerate(consumers)}
        given = ", ".join(f"%({name})s" for name in names)
        found = self.run(
            link,
            f"SELECT provider, forgotten_until FROM {self.consumers_name}"
            f" WHERE provider IN ({given}) ORDER BY provider{lock}",
            names,
        ).fetchall()
        return {consumer: float(at) for consumer, at in found if at is not None}

    def consumer_written(self, column: str, *, only_later: bool = False) -> str:
        """The statement that writes `value` for `consumer`; with `only_later`, only over a smaller
        value.
        """
        later = f" WHERE coalesce(c.{column} < %(value)s, true)" if only_later else ""
        return (
            f"INSERT INTO {self.consumers_name} AS c (provider, {column})"
            " VALUES (%(consumer)s, %(value)s)"
            f" ON CONFLICT (provider) DO UPDATE SET {column} = %(value)s{later}"
        )

    # ---- Messages that wait --------------------------------------------------------------------

    @abstractmethod
    def keep(self, link: SqlConnection, rows: Sequence[Mapping[str, Any]], *, renews: bool) -> None:
        """Keep messages, each a row of `WAITING`, as the Transaction protocol says."""

    puts: ClassVar[bool] = False
    """Whether there is a `put`."""

    def put(self, link: SqlConnection, rows: Columns) -> None:
        """Keep rows of `WAITING`, whose names are unique, without a transaction. Where nobody knows
        whether they are stored, the call may be repeated.
        """
        raise NotImplementedError

    def tell(self, link: SqlConnection) -> None:  # noqa: B027 - not all can.
        """Notify those who wait for messages that some can be taken, once this is committed."""

    def listener(self, notify: Callable[[], None]) -> "PostgresqlListener | None":  # noqa: ARG002 - as `tell`.
        """Calls `notify` at each notification; None where the database does not notify."""
        return None

    def on_conflict(self, *, renews: bool) -> str:
        """What an insert of waiting messages does with a row that is there."""
        if not renews:
            return "ON CONFLICT (message_id, provider, name) DO NOTHING"
        names = (*RENEWED, "updated_at", "due_at", "held_until")
        renewed = ", ".join(f"{name} = excluded.{name}" for name in names)
        return f"ON CONFLICT (message_id, provider, name) DO UPDATE SET {renewed}"

    limit: ClassVar[str] = "LIMIT {0:d}"
    """How a query ends that reads an index in its order, and not all rows to sort them."""
    after_in_order: ClassVar[str] = "(d.held_until, d.id) > ({0}, {1})"
    """The condition that a row of `d` comes after a place in the order `d.held_until, d.id`, read
    from the index that has that order.
    """
    in_lane: ClassVar[str] = "h.lane = {0} ORDER BY h.id"
    """The condition that a row of `h` is in a lane, and the order of these."""

    @property
    def is_free(self) -> str:
        """The condition that a row of `d` is free to take. No equality: the same order would be
        that of the numbers alone, in which planners may read all that waits in other queues.
        """
        return f"d.held_until <= {self.always}"

    def first_in(self, lane: str, wanted: str = "id", condition: str = "") -> str:
        """A column of the first message of a lane of `queue` that is not set aside."""
        return (
            f"(SELECT h.{wanted} FROM {self.waiting_name} AS h WHERE h.queue = %(queue)s"
            f" AND h.set_aside = false{condition} AND {self.in_lane.format(lane)} LIMIT 1)"
        )

    def heads(self, limit: int) -> str:
        """A query of lanes of `queue` after the lane `after`, and the number of the first message
        of each: one row of each is read, however many wait there.
        """
        after = (
            f"(SELECT h.lane FROM {self.waiting_name} AS h WHERE h.queue = %(queue)s"
            " AND h.set_aside = false AND h.lane > {} ORDER BY h.lane, h.id LIMIT 1)"
        )
        return (
            f"WITH RECURSIVE d (lane, n) AS (SELECT {after.format('%(after)s')}, 1 UNION ALL"
            f" SELECT {after.format('d.lane')}, d.n + 1 FROM d"
            f" WHERE d.lane IS NOT NULL AND d.n < {limit:d})"
            f" SELECT d.lane, {self.first_in('d.lane')} FROM d"
            " WHERE d.lane IS NOT NULL ORDER BY d.lane"
        )

    # ---- Schema --------------------------------------------------------------------------------

    def migrating(self, connection: Connection) -> AbstractContextManager[None]:
        """A block in which nobody else migrates the same table. Raises KeysLocked where another
        program does that now.
        """
        return self.transaction(connection)

    def altering(self, connection: Connection) -> AbstractContextManager[None]:  # noqa: ARG002
        """A block within `migrating` in which the schema is read, or changed: in a transaction if
        the database can do that, waiting for locks only so long that others can wait behind it.
        """
        return nullcontext()

    def index_beside(self, connection: Connection) -> None:  # noqa: B027 - not all can.
        """Index an older table of records while others write to it."""

    def unsafe_settings(self, link: SqlConnection) -> Sequence[str]:  # noqa: ARG002 - not all have any.
        """What of the server's settings can lose records, a sentence each."""
        return []

    @abstractmethod
    def grants(self, link: SqlConnection, needed: Sequence[tuple[str, Table]]) -> list[str]:
        """What gives the session's role those of the privileges, each on a table, that it lacks:
        a statement for each table. Nothing is written to find out.
        """

    @abstractmethod
    def size(self, connection: Connection) -> int | None:
        """The bytes that the table and its indexes take up."""

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A transaction on a connection of ours."""
        return in_transaction(connection)

    # ---- Running -------------------------------------------------------------------------------

    def run(
        self, link: SqlConnection, statement: str, values: Mapping[str, Any] | None = None
    ) -> Any:
        """A cursor that has executed a statement, its parameters written `%(name)s`."""
        cursor = link.connection.cursor()
        cursor.execute(statement, values or {})
        return cursor

    def selected(self, link: Connection, chosen: Select[Any]) -> Sequence[Sequence[Any]]:
        """The rows of a query."""
        return link.execute(chosen).all()

    # ---- Errors --------------------------------------------------------------------------------

    @abstractmethod
    def fault(self, error: Exception) -> Fault:
        """What an error of the driver means."""

    # ---- Parts of statements -------------------------------------------------------------------

    @abstractmethod
    def loaded_text(self, column: str, of: str = "") -> str:
        """An expression for a column of `LOADED`, `of` the table or a prefix that names it."""

    @property
    @abstractmethod
    def moment(self) -> str:
        """An expression for the time: the parameter `now`, or the database's clock."""

    @abstractmethod
    def later(self, seconds: str) -> str:
        """An expression for the time so many seconds from now."""

    @abstractmethod
    def epoch_text(self, column: str) -> str:
        """An expression for a time as seconds since 1970."""

    @abstractmethod
    def of_keys(self, name: str) -> str:
        """FROM and WHERE for the rows of a table, as `d`, that have one of `key_values`."""

    def key_values(self, keys: Sequence[Key]) -> Mapping[str, Any]:
        """The parameters for `of_keys`."""
        return {"keys": json.dumps([[key.message_id, key.consumer] for key in keys])}

    @abstractmethod
    def removal(self, name: str) -> str:
        """The statement that removes the rows of a table that have one of `key_values`."""

    @property
    def _loaded(self) -> str:
        """The columns of `LOADED`, of the table `t`."""
        return ", ".join(self.loaded_text(name, "t.") for name in LOADED)

    def loaded(self) -> list[ColumnElement[Any]]:
        """The columns that records are made from."""
        return [literal_column(self.loaded_text(name)) for name in LOADED]

    def epoch(self, column: str) -> ColumnElement[float]:
        """A time as seconds since 1970."""
        return literal_column(self.epoch_text(column))

    def time(self, link: SqlConnection) -> float:
        """The time, in seconds since 1970."""
        now = self.now()
        return float(self.run(link, f"SELECT {self.clock}").fetchone()[0]) if now is None else now


def granting(lacking: Iterable[Sequence[str]], role: Callable[[], str]) -> list[str]:
    """The statements that grant a role these privileges, each with what it is on."""
    of: dict[str, list[str]] = {}
    for privilege, on in lacking:
        of.setdefault(on, []).append(privilege)
    return [f"GRANT {', '.join(those)} ON {on} TO {role()}" for on, those in of.items()]


L_co = TypeVar("L_co", bound=SqlConnection, covariant=True)


class ConnectedTables(Generic[L_co]):
    """The tables of a ledger through one connection: runs what is the same on all databases."""

    def __init__(self, dialect: Dialect, link: L_co) -> None:
        self.dialect = dialect
        self.link = link

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        """As `Dialect.run`."""
        return self.dialect.run(self.link, statement, values)


AnyTables = ConnectedTables[SqlConnection]
OwnTables = ConnectedTables[Connection]
"""Through a connection of ours."""


@contextmanager
def in_transaction(link: SqlConnection, begin: str = "BEGIN") -> Iterator[None]:
    """A transaction on a connection that otherwise commits each statement."""
    # Not through SQLAlchemy, which would roll back once more when the connection is returned.
    cursor = link.connection.cursor()
    cursor.execute(begin)
    try:
        yield
    except BaseException as error:
        roll_back(cast(Connection, link), error)
        raise
    cursor.execute("COMMIT")


def roll_back(connection: Connection, error: BaseException) -> None:
    """Roll back the transaction that `error` has broken off, or else drop the connection."""
    if not isinstance(error, Exception):
        # Broken off anywhere, perhaps inside a call of the driver.
        connection.invalidate()
    elif not connection.invalidated:
        try:
            connection.connection.cursor().execute("ROLLBACK")
        except Exception:  # noqa: BLE001 - the error that came first is raised instead.
            connection.invalidate()
