"""The tables of a ledger: records, messages that wait, and what is known besides."""

from collections.abc import Sequence
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
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.dialects.mysql import DATETIME, LONGBLOB, LONGTEXT
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import quoted_name

from oncely.core.ids import MAX_ID_LENGTH
from oncely.stores.names import TableName

LONG = BigInteger().with_variant(Integer(), "sqlite")
TIME = (
    Float()
    .with_variant(TIMESTAMP(timezone=True), "postgresql")
    .with_variant(DATETIME(fsp=6), "mysql")
)
LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql")
JSON_TEXT = Text().with_variant(JSONB(), "postgresql").with_variant(JSON(), "mysql")
BYTES = LargeBinary().with_variant(LONGBLOB(), "mysql")


class SqlTables(NamedTuple):
    """The tables of a ledger on one kind of database."""

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
def tables(name: TableName, dialect: str, collation: str | None = None) -> SqlTables:
    """The tables of one ledger; the same for all who ask, since to make them takes milliseconds.

    The migrations make what stands here, with this `collation` of ids. No foreign keys: steps
    outlive a first claim that is released, and hand-written SQL may remove records.
    """
    metadata = MetaData(schema=name.schema and quoted_name(name.schema, quote=True))
    id_type = String(MAX_ID_LENGTH, collation=collation)

    def table(its_name: str, columns: Sequence[Column[Any]], **options: Any) -> Table:
        options |= {"mysql_engine": "InnoDB", "mysql_charset": "utf8mb4"}
        checks = _times_only(columns) if dialect == "sqlite" else []
        return Table(quoted_name(its_name, quote=True), metadata, *columns, *checks, **options)

    def beside(purpose: str, columns: Sequence[Column[Any]], **options: Any) -> Table:
        return table(name.beside(purpose), columns, **options)

    # Half of each page stays free: an update then stays on its page, and does not touch the index.
    half = {"fillfactor": 50}
    records = table(name.table, _record_columns(id_type, dialect), postgresql_with=half)
    _index_records(records, name, dialect)
    digest = String(32, collation=collation)
    # A number is never used twice: a late write must not hit another message.
    columns = _waiting_columns(id_type, digest, dialect)
    waiting = beside("waiting", columns, sqlite_autoincrement=True)
    _index_waiting(waiting, name)
    return SqlTables(
        records,
        waiting,
        beside("steps", _step_columns(id_type)),
        beside("consumers", _consumer_columns(id_type)),
        beside("bindings", _binding_columns(id_type)),
        beside("activity", _activity_columns(id_type)),
        beside("workers", _worker_columns(id_type)),
        beside("runs", _run_columns(id_type)),
        beside("audit", _audit_columns(id_type)),
    )


def _times_only(columns: Sequence[Column[Any]]) -> list[CheckConstraint]:
    """Constraints, so that nobody writes times as text or infinity. Only SQLite, in which any value
    may stand in any column, needs them; whole numbers have none, for their price.
    """
    times = [each.name for each in columns if isinstance(each.type, Float)]
    return [CheckConstraint(f"{name} BETWEEN -1e15 AND 1e15") for name in times]


def _numbers(dialect: str) -> list[Identity]:
    """Who gives a table's rows their numbers, besides the database's own autoincrement."""
    return [Identity()] if dialect == "postgresql" else []


def _record_columns(id_type: String, dialect: str) -> list[Column[Any]]:
    now = {"postgresql": text("now()"), "mysql": text("CURRENT_TIMESTAMP(6)")}.get(dialect)
    return [
        # The columns that a hand-written processed_messages table has, under its names.
        Column("id", LONG, *_numbers(dialect), nullable=False, autoincrement=True),
        Column("message_id", id_type, nullable=False),
        Column("provider", id_type, nullable=False),
        Column("status", String(50), nullable=False, server_default="processing"),
        Column("attempts", Integer, server_default="1"),
        Column("first_processed_at", TIME, nullable=False, server_default=now),
        Column("last_processed_at", TIME, nullable=False, server_default=now),
        Column("metadata", JSON_TEXT),
        # Our columns: nullable or with a default, so that a row written by hand is a record, too.
        Column("fence", LONG, nullable=False, server_default="1"),
        Column("version", LONG, nullable=False, server_default="0"),
        Column("lease_until", TIME),
        Column("fingerprint", String(64)),
        Column("result", LONG_TEXT),
        Column("exhausted", Boolean, nullable=False, server_default=false()),
        Column("duplicates", LONG, nullable=False, server_default="0"),
    ]


def _index_records(table: Table, name: TableName, dialect: str) -> None:
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


def _waiting_columns(id_type: String, digest: String, dialect: str) -> list[Column[Any]]:
    return [
        # The order in which they are taken.
        Column("id", LONG, *_numbers(dialect), primary_key=True, autoincrement=True),
        # Who takes them.
        Column("queue", id_type, nullable=False),
        # The message that each belongs to.
        Column("message_id", id_type, nullable=False),
        Column("provider", id_type, nullable=False),
        # Distinguishes it from others of that message: a digest, since an index could not hold all
        # of the columns that do.
        Column("name", digest, nullable=False),
        Column("position", Integer, nullable=False),
        Column("destination", id_type, nullable=False),
        Column("own_id", id_type, nullable=False),
        Column("type", LONG_TEXT, nullable=False),
        Column("body", BYTES, nullable=False),
        Column("headers", LONG_TEXT, nullable=False),
        Column("source", LONG_TEXT, nullable=False),
        Column("sent_at", String(64)),
        Column("content_type", LONG_TEXT, nullable=False),
        Column("ordering_key", LONG_TEXT),
        Column("lane", digest, nullable=False),
        Column("delay_s", Double, nullable=False),
        Column("created_at", TIME, nullable=False),
        Column("updated_at", TIME, nullable=False),
        # When it is due.
        Column("due_at", TIME, nullable=False),
        # Until then nobody takes it; 1970 where it is free: not held, and its delay is over.
        Column("held_until", TIME, nullable=False),
        Column("attempts", Integer, nullable=False, server_default="0"),
        Column("error", LONG_TEXT),
        Column("reason", LONG_TEXT),
        Column("set_aside", Boolean, nullable=False, server_default=false()),
    ]


def _index_waiting(table: Table, name: TableName) -> None:
    c = table.c
    table.append_constraint(
        UniqueConstraint(c.message_id, c.provider, c.name, name=name.index_of_waiting("name"))
    )
    Index(name.index_of_waiting("free"), c.queue, c.set_aside, c.held_until, c.id)
    Index(name.index_of_waiting("lanes"), c.queue, c.set_aside, c.lane, c.id)


def _step_columns(id_type: String) -> list[Column[Any]]:
    """The result of a finished step."""
    return [
        *(Column(name, id_type, primary_key=True) for name in ("message_id", "provider", "name")),
        Column("result", LONG_TEXT, nullable=False),
        Column("created_at", TIME, nullable=False),
    ]


def _consumer_columns(id_type: String) -> list[Column[Any]]:
    """The retention and the horizon of a consumer."""
    return [
        Column("provider", id_type, primary_key=True),
        Column("retention_s", Double),
        # Seconds since 1970, and not a time: it is compared exactly as it was read.
        Column("forgotten_until", Double),
    ]


def _binding_columns(id_type: String) -> list[Column[Any]]:
    """A queue, and events that it has subscribed to."""
    return [
        Column("queue", id_type, primary_key=True),
        # Empty: queues in a database have no exchange.
        Column("exchange", id_type, primary_key=True),
        # The types of events that it takes; empty where the row only says that the queue exists.
        Column("pattern", id_type, primary_key=True),
    ]


# What follows is written by few and read by people: its times are seconds since 1970.


def _activity_columns(id_type: String) -> list[Column[Any]]:
    """What a worker did for a consumer in a period."""
    counts = ("handled", "failed", "exhausted", "duplicates", "in_doubt")
    return [
        Column("provider", id_type, primary_key=True),
        Column("worker", id_type, primary_key=True),
        Column("began", LONG, primary_key=True, autoincrement=False),
        *(Column(name, LONG, nullable=False) for name in counts),
        # A JSON list.
        Column("seconds", LONG_TEXT, nullable=False),
    ]


def _worker_columns(id_type: String) -> list[Column[Any]]:
    """A process that works with the ledger."""
    return [
        Column("id", id_type, primary_key=True),
        *(Column(name, id_type, nullable=False) for name in ("kind", "provider", "host")),
        Column("pid", LONG, nullable=False),
        Column("version", id_type, nullable=False),
        Column("started", Double, nullable=False),
        Column("seen", Double, nullable=False),
        Column("claims", LONG, nullable=False),
    ]


def _run_columns(id_type: String) -> list[Column[Any]]:
    """A run on Spark."""
    return [
        Column("id", id_type, primary_key=True),
        *(Column(name, id_type, nullable=False) for name in ("name", "provider")),
        Column("began", Double, nullable=False),
        Column("ended", Double),
        # JSON.
        Column("totals", LONG_TEXT, nullable=False),
        Column("error", LONG_TEXT),
    ]


def _audit_columns(id_type: String) -> list[Column[Any]]:
    """Something that a person changed, or has begun to change."""
    return [
        Column("id", LONG, primary_key=True, autoincrement=True),
        Column("at", Double, nullable=False),
        *(Column(name, id_type, nullable=False) for name in ("changed_by", "action")),
        *(Column(name, id_type, nullable=False) for name in ("provider", "message_id")),
        # Unknown until the action has ended.
        *(Column(name, LONG) for name in ("chosen", "changed", "refused")),
        Column("why", LONG_TEXT, nullable=False),
    ]
