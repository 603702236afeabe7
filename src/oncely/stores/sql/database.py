"""What differs between databases; everything else of the SQL store is the same for all."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, func, literal_column, select

from oncely.core.record import Key, Record
from oncely.stores.base import Loaded
from oncely.stores.sql.batches import batches
from oncely.stores.sql.rows import LOADED, Pair, by_place, record_of
from oncely.stores.sql.table import Tables

T = TypeVar("T")

_MOST_SAMPLES = 400
"""SQLite puts at most 500 queries together."""


class Link(Protocol):
    """What statements need of a connection: a Connection of ours has it, or what stands for the
    caller's.
    """

    @property
    def connection(self) -> Any:
        """Its `cursor()` takes statements and parameters as the driver of our connections does."""

    @property
    def info(self) -> MutableMapping[Any, Any]:
        """What is known of the connection."""


class Fault(Enum):
    """What an error of a driver means."""

    NO_TABLE = auto()
    """The table, or a column of it, is not there."""
    ROLLED_BACK = auto()
    """Lost against another transaction, and nothing is stored: the same again."""
    LOST = auto()
    """The connection is gone; what was being written may be stored, or not."""
    UNAVAILABLE = auto()
    """The database is there and does not serve."""
    OTHER = auto()


class Database(ABC):
    """Statements and errors of one kind of database, for one ledger.

    Statements are text that is built once, for raw cursors: SQLAlchemy's own work per row would
    cost more than the database's. `now` is a time that a test has set, None for the database's
    own clock.

    Where it `is_inside`, its statements are for a transaction that is open already, on a session
    with anybody's settings: they neither begin nor end it, and `load` locks what it finds.
    """

    clock: ClassVar[str]
    """An expression for the database's clock, in seconds since 1970."""
    position: ClassVar[str]
    """The function that finds a text in a text, letter by letter."""
    false: ClassVar[str] = "false"
    true: ClassVar[str] = "true"
    always: ClassVar[str]
    """A time that is long past."""
    insert_absent: ClassVar[str] = "INSERT INTO {} ON CONFLICT DO NOTHING"
    """An insert of rows which leaves those that are there."""
    skip_locked: ClassVar[str]
    """How a query of the table `d` locks its rows, and leaves out what others have locked."""

    def __init__(self, engine: Engine, tables: Tables, *, is_inside: bool = False) -> None:
        self._engine = engine
        self._tables = tables
        self.is_inside = is_inside
        self.table = tables.records
        name_of = engine.dialect.identifier_preparer.format_table
        self.name = name_of(tables.records)
        self.deferred_name = name_of(tables.deferred)
        self.steps_name = name_of(tables.steps)
        self.channel = tables.deferred.name
        """By which those are told who wait for deferred messages, where a database can tell."""

    @cached_property
    def inside(self) -> Self:
        """The same for use inside transactions."""
        return type(self)(self._engine, self._tables, is_inside=True)

    def prepare(self, connection: Any, _: object) -> None:  # noqa: B027 - not all have to.
        """Make a new connection fit for the ledger."""

    def start_afresh(self) -> None:  # noqa: B027 - not all have locks.
        """Leave locks to the parent: called in a forked child."""

    # ---- Records -------------------------------------------------------------------------------

    @abstractmethod
    def insert(self, link: Link, records: Sequence[Record], now: float | None) -> set[Key]:
        """Write one of `batches` of records as the Store protocol says."""

    def insert_alike(
        self, link: Link, record: Record, message_ids: Sequence[str], now: float | None
    ) -> set[str]:
        """As `insert`, of records that differ from `record` in their message ids alone."""
        keys = [Key(record.key.consumer, message_id) for message_id in message_ids]
        written: set[Key] = set()
        for batch in self.batches([record._replace(key=key) for key in keys]):
            written |= self.insert(link, batch, now)
        return {key.message_id for key in written}

    @abstractmethod
    def swap(self, link: Link, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        """Replace the first by the second of each pair, as the Store protocol says."""

    @abstractmethod
    def remove(self, link: Link, records: Sequence[Record]) -> set[Key]:
        """Remove those that are unchanged, as the Store protocol says."""

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        """`items` in parts that are stored whole or not at all: one can be tried again."""
        return batches(items)

    def load(self, link: Link, keys: Collection[Key], now: float | None) -> Loaded:
        """As the Store protocol says."""
        # What is locked as it is read may tell the time itself: nobody extends a lease meanwhile.
        at = None if self.is_inside else self.now(link, now)
        found: dict[Key, Record] = {}
        for batch in batches(by_place(keys)):
            for row in self.rows_of(link, batch, now):
                record = record_of(row)
                found[record.key] = record
                if at is None:
                    at = float(row[len(LOADED)])
        return Loaded(found, self.now(link, now) if at is None else at)

    @abstractmethod
    def rows_of(
        self, link: Link, keys: Sequence[Key], now: float | None
    ) -> Iterable[Sequence[Any]]:
        """The rows of these keys that exist: the columns of `LOADED`, and inside transactions one
        with the time before it was locked.
        """

    def sample_ids(self, link: Link, number: int) -> Sequence[str]:
        """Message ids from all over the table, in the order of its index: about `number`, or some
        times as many where there are more.
        """
        first, last = self.run(link, f"SELECT min(id), max(id) FROM {self.name}").fetchone()
        if first is None:
            return []
        number = min(number, _MOST_SAMPLES)
        places = range(first, last + 1, max(1, -(-(last + 1 - first) // number)))
        nearest = f"(SELECT min(id) FROM {self.name} WHERE id >= {{}})"
        chosen = " UNION ".join(
            f"SELECT message_id FROM {self.name} WHERE id = {nearest.format(place)}"
            for place in places
        )
        return [row[0] for row in self.run(link, f"{chosen} ORDER BY message_id").fetchall()]

    def purge(
        self, connection: Connection, condition: ColumnElement[bool], limit: int, *, steps: bool
    ) -> int:
        """Remove at most `limit` records that fit, in one transaction, and their `steps` where
        there are any; return how many records.
        """
        c = self.table.c
        # Rows that another cleaner, or a worker, is at are left to them.
        chosen = select(c.id, c.message_id, c.provider).where(condition).limit(limit)
        with self.transaction(connection):
            found = connection.execute(chosen.with_for_update(skip_locked=True)).all()
            if found:
                ids = ", ".join(f"{row.id:d}" for row in found)
                self.run(connection, f"DELETE FROM {self.name} WHERE id IN ({ids})")
            if found and steps:
                self.remove_steps(connection, [Key(row.provider, row.message_id) for row in found])
        return len(found)

    def has_beside(self, link: Link) -> tuple[bool, bool]:
        """Whether there are any deferred messages, and any steps."""
        tables = (self.deferred_name, self.steps_name)
        asked = ", ".join(f"EXISTS (SELECT 1 FROM {name})" for name in tables)
        some_wait, some_steps = self.run(link, f"SELECT {asked}").fetchone()
        return bool(some_wait), bool(some_steps)

    def remove_steps(self, link: Link, keys: Sequence[Key]) -> None:
        """Remove the steps of one of `batches` of messages."""
        self.run(link, self.steps_removal, self.key_values(by_place(keys)))

    # ---- Deferred messages ---------------------------------------------------------------------

    @abstractmethod
    def defer(self, link: Link, rows: Sequence[Mapping[str, Any]], now: float | None) -> None:
        """Keep deferred messages, each a row of `DEFERRED`, as the Inside protocol says."""

    # ---- Schema --------------------------------------------------------------------------------

    @abstractmethod
    def migrating(self, connection: Connection) -> AbstractContextManager[None]:
        """While nobody else migrates the same table; in a transaction, where the schema can be."""

    @abstractmethod
    def size(self, connection: Connection) -> int | None:
        """The bytes that the table and its indexes take up."""

    # ---- Transactions --------------------------------------------------------------------------

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A transaction on a connection of ours."""
        return in_transaction(connection)

    # ---- Running -------------------------------------------------------------------------------

    def run(self, link: Link, statement: str, values: Mapping[str, Any] | None = None) -> Any:
        """A cursor that has executed a statement, its parameters written `%(name)s`."""
        cursor = raw_cursor(link)
        cursor.execute(statement, values or {})
        return cursor

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
        """An expression for so many seconds after the time."""

    @abstractmethod
    def epoch_text(self, column: str) -> str:
        """An expression for a time as seconds since 1970."""

    @abstractmethod
    def of_keys(self, name: str) -> str:
        """FROM and WHERE for those rows of a table, as `d`, that have one of `key_values`."""

    @abstractmethod
    def key_values(self, keys: Sequence[Key]) -> Mapping[str, Any]:
        """The parameters for `of_keys`."""

    @property
    @abstractmethod
    def steps_removal(self) -> str:
        """The statement that removes the steps of messages with one of `key_values`."""

    def loaded(self) -> list[ColumnElement[Any]]:
        """The columns that records are made from."""
        return [literal_column(self.loaded_text(name)) for name in LOADED]

    def epoch(self, column: str) -> ColumnElement[float]:
        """A time as seconds since 1970."""
        return literal_column(self.epoch_text(column))

    def holds_text(self, text: str) -> ColumnElement[bool]:
        """Whether the message id holds `text`, letter by letter."""
        position: ColumnElement[int] = getattr(func, self.position)(
            self.table.c.message_id, bindparam(None, text)
        )
        return position > 0

    def now(self, link: Link, now: float | None) -> float:
        """The time."""
        if now is not None:
            return now
        return float(self.run(link, f"SELECT {self.clock}").fetchone()[0])


def raw_cursor(link: Link) -> Any:
    """The driver's own cursor, or what stands for one."""
    return link.connection.cursor()


@contextmanager
def in_transaction(link: Link) -> Iterator[None]:
    """A transaction on a connection that else commits each statement."""
    # Past SQLAlchemy, which would roll back once more when it gets the connection back.
    cursor = raw_cursor(link)
    cursor.execute("BEGIN")
    try:
        yield
    except BaseException as error:
        roll_back(cast(Connection, link), error)
        raise
    cursor.execute("COMMIT")


def roll_back(connection: Connection, error: BaseException) -> None:
    """End the transaction that `error` has broken off; where that fails, with its connection."""
    if not isinstance(error, Exception):
        # Broken off anywhere, also within a call of the driver.
        connection.invalidate()
    elif not connection.invalidated:
        try:
            raw_cursor(connection).execute("ROLLBACK")
        except Exception:  # noqa: BLE001 - whatever it is, what it interrupted is told instead.
            connection.invalidate()
