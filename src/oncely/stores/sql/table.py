"""The table `processed_messages`: its name and its columns."""

from sqlalchemy import (
    JSON,
    TIMESTAMP,
    BigInteger,
    Boolean,
    Column,
    Float,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.dialects.mysql import DATETIME, LONGTEXT
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.elements import quoted_name

from oncely.core.message import MAX_ID_LENGTH
from oncely.stores.names import TableName

_long = BigInteger().with_variant(Integer(), "sqlite")
_time = (
    Float()
    .with_variant(TIMESTAMP(timezone=True), "postgresql")
    .with_variant(DATETIME(fsp=6), "mysql")
)
_long_text = Text().with_variant(LONGTEXT(), "mysql")
_json = Text().with_variant(JSONB(), "postgresql").with_variant(JSON(), "mysql")


def processed_messages(name: TableName, dialect: str) -> Table:
    """The table as the newest migration leaves it on that kind of database."""
    table = Table(
        quoted_name(name.table, quote=True),
        MetaData(schema=name.schema and quoted_name(name.schema, quote=True)),
        # The columns that a hand-written processed_messages table has, under its names.
        Column("id", _long, nullable=False, autoincrement=True),
        Column("message_id", String(MAX_ID_LENGTH), nullable=False),
        Column("provider", String(MAX_ID_LENGTH), nullable=False),
        Column("status", String(50), nullable=False),
        Column("attempts", Integer),
        Column("first_processed_at", _time, nullable=False),
        Column("last_processed_at", _time, nullable=False),
        Column("metadata", _json),
        # What is added: nullable or with a default, so that a row written by hand is a record too.
        Column("fence", _long, nullable=False),
        Column("version", _long, nullable=False),
        Column("lease_until", _time),
        Column("fingerprint", String(64)),
        Column("result", _long_text),
        Column("exhausted", Boolean, nullable=False),
        Column("duplicates", _long, nullable=False),
    )
    key = (table.c.message_id, table.c.provider)
    if dialect == "postgresql":
        # One index is half the work of two: `id` is there to be read, and nothing looks it up.
        table.append_constraint(PrimaryKeyConstraint(*key, name=name.unique))
    else:
        table.append_constraint(PrimaryKeyConstraint(table.c.id))
        table.append_constraint(UniqueConstraint(*key, name=name.unique))
    return table
