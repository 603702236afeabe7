"""The tables of a ledger: records, messages that wait, and what is known besides."""

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    JSON,
    TIMESTAMP,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.mysql import DATETIME, LONGBLOB, LONGTEXT
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import quoted_name

from oncely.core.destination import MAX_DESTINATION_LENGTH
from oncely.core.ids import MAX_ID_LENGTH
from oncely.stores.names import TableName

# The migrations use these as well: to change a column's type, add another.
LONG = BigInteger().with_variant(Integer(), "sqlite")
TIME = (
    Float()
    .with_variant(TIMESTAMP(timezone=True), "postgresql")
    .with_variant(DATETIME(fsp=6), "mysql")
)
LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql")
JSON_TEXT = Text().with_variant(JSONB(), "postgresql").with_variant(JSON(), "mysql")
BYTES = LargeBinary().with_variant(LONGBLOB(), "mysql")


def times_only(columns: Iterable[Column[Any]], dialect: str) -> list[CheckConstraint]:
    """Constraints of a new table, so that nobody writes times as text or infinity. Only SQLite, in
    which any value may stand in any column, needs them; whole numbers have none, for their price.
    """
    if dialect != "sqlite":
        return []
    times = [each.name for each in columns if isinstance(each.type, Float)]
    return [CheckConstraint(f"{name} BETWEEN -1e15 AND 1e15") for name in times]


class SqlTables(NamedTuple):
    """The tables as the newest migration leaves them on one kind of database."""

    records: Table
    waiting: Table
    steps: Table
    consumers: Table
    bindings: Table
    activity: Table
    workers: Table
    runs: Table
    audit: Table


@cache
def tables(name: TableName, dialect: str) -> SqlTables:
    """The tables of one ledger; the same for all who ask, since to make them takes milliseconds."""
    metadata = MetaData(schema=name.schema and quoted_name(name.schema, quote=True))
    return SqlTables(
        _processed_messages(name, dialect, metadata),
        _waiting_messages(name, metadata),
        _message_steps(name, metadata),
        _message_consumers(name, metadata),
        _message_bindings(name, metadata),
        Table(quoted_name(name.activity, quote=True), metadata, *activity_columns()),
        Table(quoted_name(name.workers, quote=True), metadata, *worker_columns()),
        Table(quoted_name(name.runs, quote=True), metadata, *run_columns()),
        Table(quoted_name(name.audit, quote=True), metadata, *audit_columns()),
    )


def _processed_messages(name: TableName, dialect: str, metadata: MetaData) -> Table:
    table = Table(
        quoted_name(name.table, quote=True),
        metadata,
        # The columns that a hand-written processed_messages table has, under its names.
        Column("id", LONG, nullable=False, autoincrement=True),
        Column("message_id", String(MAX_ID_LENGTH), nullable=False),
        Column("provider", String(MAX_ID_LENGTH), nullable=False),
        Column("status", String(50), nullable=False),
        Column("attempts", Integer),
        Column("first_processed_at", TIME, nullable=False),
        Column("last_processed_at", TIME, nullable=False),
        Column("metadata", JSON_TEXT),
        # Our columns: nullable or with a default, so that a row written by hand is a record, too.
        Column("fence", LONG, nullable=False),
        Column("version", LONG, nullable=False),
        Column("lease_until", TIME),
        Column("fingerprint", String(64)),
        Column("result", LONG_TEXT),
        Column("exhausted", Boolean, nullable=False),
        Column("duplicates", LONG, nullable=False),
    )
    key = (table.c.message_id, table.c.provider)
    if dialect == "postgresql":
        # One index is half the work of two: `id` is only read, and never looked up.
        table.append_constraint(PrimaryKeyConstraint(*key, name=name.unique))
    else:
        table.append_constraint(PrimaryKeyConstraint(table.c.id))
        table.append_constraint(UniqueConstraint(*key, name=name.unique))
    if dialect != "mysql":
        # What is completed is nearly all, and nobody looks for it by its state.
        rest = text("status <> 'sent'")
        Index(name.unfinished, table.c.status, postgresql_where=rest, sqlite_where=rest)
    return table


def _waiting_messages(name: TableName, metadata: MetaData) -> Table:
    table = Table(
        quoted_name(name.waiting, quote=True),
        metadata,
        # The order in which they are taken.
        Column("id", LONG, primary_key=True, autoincrement=True),
        # Who takes them.
        Column("queue", String(MAX_ID_LENGTH), nullable=False),
        # The message that each belongs to.
        Column("message_id", String(MAX_ID_LENGTH), nullable=False),
        Column("provider", String(MAX_ID_LENGTH), nullable=False),
        # Distinguishes it from others of that message: a digest, since an index could not hold all
        # of the columns that do.
        Column("name", String(32), nullable=False),
        Column("position", Integer, nullable=False),
        Column("destination", String(MAX_DESTINATION_LENGTH), nullable=False),
        Column("own_id", String(MAX_ID_LENGTH), nullable=False),
        Column("type", LONG_TEXT, nullable=False),
        Column("body", BYTES, nullable=False),
        Column("headers", LONG_TEXT, nullable=False),
        Column("source", LONG_TEXT, nullable=False),
        Column("sent_at", String(64)),
        Column("content_type", LONG_TEXT, nullable=False),
        Column("ordering_key", LONG_TEXT),
        Column("lane", String(32), nullable=False),
        Column("delay_s", Double, nullable=False),
        Column("created_at", TIME, nullable=False),
        Column("updated_at", TIME, nullable=False),
        # When it is due.
        Column("due_at", TIME, nullable=False),
        # Until then nobody takes it; 1970 where it is free: not held, and its delay is over.
        Column("held_until", TIME, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("error", LONG_TEXT),
        Column("reason", LONG_TEXT),
        Column("set_aside", Boolean, nullable=False),
    )
    c = table.c
    table.append_constraint(
        UniqueConstraint(c.message_id, c.provider, c.name, name=name.index_of_waiting("name"))
    )
    Index(name.index_of_waiting("free"), c.queue, c.set_aside, c.held_until, c.id)
    # A message that is alone in its lane is never looked up by the lane.
    Index(
        name.index_of_waiting("lane"),
        c.lane,
        c.set_aside,
        c.id,
        postgresql_where=text("lane <> name"),
        sqlite_where=text("lane <> name"),
    )
    return table


def _message_steps(name: TableName, metadata: MetaData) -> Table:
    return Table(
        quoted_name(name.steps, quote=True),
        metadata,
        Column("message_id", String(MAX_ID_LENGTH), primary_key=True),
        Column("provider", String(MAX_ID_LENGTH), primary_key=True),
        Column("name", String(MAX_ID_LENGTH), primary_key=True),
        Column("result", LONG_TEXT, nullable=False),
        Column("created_at", TIME, nullable=False),
    )


def _message_consumers(name: TableName, metadata: MetaData) -> Table:
    return Table(
        quoted_name(name.consumers, quote=True),
        metadata,
        Column("provider", String(MAX_ID_LENGTH), primary_key=True),
        Column("retention_s", Double),
        # Seconds since 1970, and not a time: it is compared exactly as it was read.
        Column("forgotten_until", Double),
    )


def _message_bindings(name: TableName, metadata: MetaData) -> Table:
    return Table(
        quoted_name(name.bindings, quote=True),
        metadata,
        Column("queue", String(MAX_ID_LENGTH), primary_key=True),
        # Empty for queues in this database, which have no exchange.
        Column("exchange", String(MAX_ID_LENGTH), primary_key=True),
        # The types of events that it takes; empty where the row only says that the queue exists.
        Column("pattern", String(MAX_ID_LENGTH), primary_key=True),
    )


# What follows is written by few and read by people: its times are seconds since 1970.


def activity_columns(text_type: String = String(MAX_ID_LENGTH)) -> list[Column[Any]]:
    """What a worker did for a consumer in a period."""
    counts = ("handled", "failed", "exhausted", "duplicates", "in_doubt")
    return [
        Column("provider", text_type, primary_key=True),
        Column("worker", text_type, primary_key=True),
        Column("began", LONG, primary_key=True, autoincrement=False),
        *(Column(name, LONG, nullable=False) for name in counts),
        # A JSON list.
        Column("seconds", LONG_TEXT, nullable=False),
    ]


def worker_columns(text_type: String = String(MAX_ID_LENGTH)) -> list[Column[Any]]:
    """A process that works with the ledger."""
    return [
        Column("id", text_type, primary_key=True),
        *(Column(name, text_type, nullable=False) for name in ("kind", "provider", "host")),
        Column("pid", LONG, nullable=False),
        Column("version", text_type, nullable=False),
        Column("started", Double, nullable=False),
        Column("seen", Double, nullable=False),
        Column("claims", LONG, nullable=False),
    ]


def run_columns(text_type: String = String(MAX_ID_LENGTH)) -> list[Column[Any]]:
    """A run on Spark."""
    return [
        Column("id", text_type, primary_key=True),
        *(Column(name, text_type, nullable=False) for name in ("name", "provider")),
        Column("began", Double, nullable=False),
        Column("ended", Double),
        # JSON.
        Column("totals", LONG_TEXT, nullable=False),
        Column("error", LONG_TEXT),
    ]


def audit_columns(text_type: String = String(MAX_ID_LENGTH)) -> list[Column[Any]]:
    """Something that a person changed, or has begun to change."""
    return [
        Column("id", LONG, primary_key=True, autoincrement=True),
        Column("at", Double, nullable=False),
        *(Column(name, text_type, nullable=False) for name in ("changed_by", "action")),
        *(Column(name, text_type, nullable=False) for name in ("provider", "message_id")),
        # Unknown until the action has ended.
        *(Column(name, LONG) for name in ("chosen", "changed", "refused")),
        Column("why", LONG_TEXT, nullable=False),
    ]
