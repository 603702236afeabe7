"""What differs between databases; everything else of the SQL store is the same for all."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from typing import Any, ClassVar, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Table, bindparam, func, literal_column

from oncely.core.record import Key, Record
from oncely.stores.base import Loaded
from oncely.stores.sql.batches import batches
from oncely.stores.sql.rows import LOADED, Pair, record_of

T = TypeVar("T")


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
    """Statements and errors of one kind of database, for one table.

    Statements are text that is built once, for raw cursors: SQLAlchemy's own work per row would
    cost more than the database's. `now` is a time that a test has set, None for the database's
    own clock.
    """

    clock: ClassVar[str]
    """An expression for the database's clock, in seconds since 1970."""
    position: ClassVar[str]
    """The function that finds a text in a text, letter by letter."""

    def __init__(self, engine: Engine, table: Table) -> None:
        self.table = table
        self.name = engine.dialect.identifier_preparer.format_table(table)

    def prepare(self, connection: Any, _: object) -> None:  # noqa: B027 - not all have to.
        """Make a new connection fit for the ledger."""

    def start_afresh(self) -> None:  # noqa: B027 - not all have locks.
        """Leave locks to the parent: called in a forked child."""

    # ---- Records -------------------------------------------------------------------------------

    @abstractmethod
    def insert(
        self, connection: Connection, records: Sequence[Record], now: float | None
    ) -> set[Key]:
        """Write one of `batches` of records as the Store protocol says."""

    @abstractmethod
    def swap(self, connection: Connection, pairs: Sequence[Pair], now: float | None) -> set[Key]:
        """Replace the first by the second of each pair, as the Store protocol says."""

    @abstractmethod
    def remove(self, connection: Connection, records: Sequence[Record]) -> set[Key]:
        """Remove those that are unchanged, as the Store protocol says."""

    def batches(self, items: Sequence[T]) -> Iterable[Sequence[T]]:
        """`items` in parts that are stored whole or not at all: one can be tried again."""
        return batches(items)

    def load(self, connection: Connection, keys: Collection[Key], now: float | None) -> Loaded:
        """As the Store protocol says."""
        at = self.now(connection, now)
        found: dict[Key, Record] = {}
        for batch in batches(sorted(keys)):
            for record in map(record_of, self.rows_of(connection, batch)):
                found[record.key] = record
        return Loaded(found, at)

    @abstractmethod
    def rows_of(self, connection: Connection, keys: Sequence[Key]) -> Iterable[Sequence[Any]]:
        """The rows of these keys that exist, their columns those of `LOADED`."""

    @abstractmethod
    def purge(self, connection: Connection, condition: ColumnElement[bool], limit: int) -> int:
        """Remove at most `limit` rows that fit, in one transaction; return how many."""

    # ---- Schema --------------------------------------------------------------------------------

    @abstractmethod
    def migrating(self, connection: Connection) -> AbstractContextManager[None]:
        """While nobody else migrates the same table; in a transaction, where the schema can be."""

    @abstractmethod
    def size(self, connection: Connection) -> int | None:
        """The bytes that the table and its indexes take up."""

    # ---- Errors --------------------------------------------------------------------------------

    @abstractmethod
    def fault(self, error: Exception) -> Fault:
        """What an error of the driver means."""

    # ---- Parts of statements -------------------------------------------------------------------

    @abstractmethod
    def loaded_text(self, column: str, of: str = "") -> str:
        """An expression for a column of `LOADED`, `of` the table or a prefix that names it."""

    def loaded(self) -> list[ColumnElement[Any]]:
        """The columns that records are made from."""
        return [literal_column(self.loaded_text(name)) for name in LOADED]

    def epoch(self, column: str) -> ColumnElement[float]:
        """A time as seconds since 1970."""
        return literal_column(self.loaded_text(column))

    def holds_text(self, text: str) -> ColumnElement[bool]:
        """Whether the message id holds `text`, letter by letter."""
        position: ColumnElement[int] = getattr(func, self.position)(
            self.table.c.message_id, bindparam(None, text)
        )
        return position > 0

    def now(self, connection: Connection, now: float | None) -> float:
        """The time."""
        if now is not None:
            return now
        cursor = raw_cursor(connection)
        cursor.execute(f"SELECT {self.clock}")
        return float(cursor.fetchone()[0])


def raw_cursor(connection: Connection) -> Any:
    """The driver's own cursor."""
    return connection.connection.cursor()


@contextmanager
def in_transaction(connection: Connection) -> Iterator[None]:
    """A transaction on a connection that else commits each statement."""
    # Past SQLAlchemy, which would roll back once more when it gets the connection back.
    cursor = raw_cursor(connection)
    cursor.execute("BEGIN")
    try:
        yield
    except BaseException:
        cursor.execute("ROLLBACK")
        raise
    cursor.execute("COMMIT")
