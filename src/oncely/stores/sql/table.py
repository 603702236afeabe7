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
        # So that nobody writes times as text or infinity. Only SQLite, in which any value may stand
        # in any column, needs that; whole numbers have no constraints, for their price.
        times = [c.name for c in columns if isinstance(c.type, Float) and dialect == "sqlite"]
        checks = [CheckConstraint(f"{name} BETWEEN -1e15 AND 1e15") for name in times]
        return Table(quoted_name(its_name, quote=True), metadata, *columns, *checks, **options)

    def beside(purpose: str, columns: Sequence[Column[Any]], **options: Any) -> Table:
        return table(name.beside(purpose), columns, **options)

    # Half of each page stays free: an update then stays on its page, and does not touch the index.
    half = {"fillfactor": 50}
    records = table(name.table, _record_columns(id_type, dialect), postgresql_with=half)
    key = (records.c.message_id, records.c.provider)
    if dialect == "postgresql":
        # One index is half the work of two: `id` is only read, and never looked up.
        records.append_constraint(PrimaryKeyConstraint(*key, name=name.unique))
    else:
        records.append_constraint(PrimaryKeyConstraint(records.c.id))
        records.append_constraint(UniqueConstraint(*key, name=name.unique))
    if dialect != "mysql":
        # What is completed is nearly all, and nobody looks for it by its state.
        rest = text("status <> 'sent'")
        Index(name.unfinished, records.c.status, postgresql_where=rest, sqlite_where=rest)
    digest = String(32, collation=collation)
    # A number is never used twice: a late write must not hit another message.
    columns = _waiting_columns(id_type, digest, dialect)
    waiting = beside("waiting", columns, sqlite_autoincrement=True)
    c = waiting.c
    unique_name = name.index_of_waiting("name")
    waiting.append_constraint(UniqueConstraint(c.message_id, c.provider, c.name, name=unique_name))
    Index(name.index_of_waiting("free"), c.queue, c.set_aside, c.held_until, c.id)
    Index(name.index_of_waiting("lanes"), c.queue, c.set_aside, c.lane, c.id)
    return SqlTables(
        records,
        waiting,
        **{name: beside(name, columns) for name, columns in _other_columns(id_type).items()},
    )


def _record_columns(id_type: String, dialect: str) -> list[Column[Any]]:
    numbers = [Identity()] if dialect == "postgresql" else []
    now = {"postgresql": text("now()"), "mysql": text("CURRENT_TIMESTAMP(6)")}.get(dialect)
    return [
        # The columns that a hand-written processed_messages table has, under its names.
        Column("id", LONG, *numbers, nullable=False, autoincrement=True),
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
        Column("worker", LONG),
    ]


def _waiting_columns(id_type: String, digest: String, dialect: str) -> list[Column[Any]]:
    numbers = [Identity()] if dialect == "postgresql" else []
    return [
        # The order in which they are taken.
        Column("id", LONG, *numbers, primary_key=True, autoincrement=True),
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


def _given(kind: Any, *names: str) -> list[Column[Any]]:
    return [Column(name, kind, nullable=False) for name in names]


def _other_columns(id_type: String) -> dict[str, list[Column[Any]]]:
    """The columns of the other tables, by what each is for."""

    def key(*names: str) -> list[Column[Any]]:
        return [Column(name, id_type, primary_key=True) for name in names]

    return {
        # The result of a finished step.
        "steps": [
            *key("message_id", "provider", "name"),
            *_given(LONG_TEXT, "result"),
            *_given(TIME, "created_at"),
        ],
        # The retention and the horizon of a consumer. The horizon is seconds since 1970, and not a
        # time: it is compared exactly as it was read.
        "consumers": [
            *key("provider"),
            Column("retention_s", Double),
            Column("forgotten_until", Double),
        ],
        # A queue, and events that it has subscribed to. `exchange` is empty: queues in a database
        # have none. So is `pattern`, the type of an event, where the row only says that the queue
        # exists.
        "bindings": key("queue", "exchange", "pattern"),
        # What follows is written by few and read by people: its times are seconds since 1970.
        # What a worker did for a consumer in a period; `seconds` is a JSON list.
        "activity": [
            *key("provider", "worker"),
            Column("began", LONG, primary_key=True, autoincrement=False),
            *_given(LONG, "handled", "failed", "exhausted", "duplicates", "in_doubt"),
            *_given(LONG_TEXT, "seconds"),
        ],
        # A process that works with the ledger.
        "workers": [
            *key("id"),
            *_given(id_type, "kind", "provider", "host"),
            *_given(LONG, "pid"),
            *_given(id_type, "version"),
            *_given(Double, "started", "seen"),
            *_given(LONG, "claims"),
            Column("number", LONG),
            Column("ended", Double),
            Column("lags", LONG_TEXT),
        ],
        # A run on Spark; `totals` is JSON.
        "runs": [
            *key("id"),
            *_given(id_type, "name", "provider"),
            *_given(Double, "began"),
            Column("ended", Double),
            *_given(LONG_TEXT, "totals"),
            Column("error", LONG_TEXT),
        ],
        # Something that a person changed, or has begun to change: the counts are unknown until the
        # action has ended.
        "audit": [
            Column("id", LONG, primary_key=True, autoincrement=True),
            *_given(Double, "at"),
            *_given(id_type, "changed_by", "action", "provider", "message_id"),
            *(Column(name, LONG) for name in ("chosen", "changed", "refused")),
            *_given(LONG_TEXT, "why"),
        ],
    }
