"""The table `processed_messages`: its name and its columns."""

import hashlib
import re
from typing import NamedTuple

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

from oncely.core.errors import ConfigError
from oncely.core.message import MAX_ID_LENGTH

TABLE_NAME = "processed_messages"
UNIQUE_NAME = "uq_message_provider"

_MAX_BYTES = 63
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class TableName(NamedTuple):
    """Which table the records are in."""

    table: str = TABLE_NAME
    schema: str | None = None

    @property
    def version_table(self) -> str:
        """The table that tells which migrations this one has seen."""
        # Alembic names its primary key with four bytes more.
        return _shortened(f"{self.table}_version", _MAX_BYTES - len("_pkc"))

    @property
    def unique(self) -> str:
        """The constraint that no key stands twice. In PostgreSQL it names an index as well, and
        indexes of one schema have to differ.
        """
        return UNIQUE_NAME if self.table == TABLE_NAME else _shortened(f"uq_{self.table}")

    def checked(self) -> "TableName":
        """Itself. Raises ConfigError where a name is no identifier, or over 63 bytes long."""
        for what, name in (("table", self.table), ("schema", self.schema)):
            if name is None and what == "schema":
                continue
            if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):
                raise ConfigError(
                    f"{what}: {name!r} is no name for a {what}; use letters, digits and "
                    f'underscores, such as "{TABLE_NAME}"'
                )
            if len(name) > _MAX_BYTES:
                raise ConfigError(
                    f"{what}: {name!r} is {len(name)} bytes long; databases take {_MAX_BYTES}"
                )
        return self


def _shortened(name: str, length: int = _MAX_BYTES) -> str:
    """`name`, its end replaced by a digest of the whole where it is longer than `length`."""
    if len(name) <= length:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[: length - len(digest) - 1]}_{digest}"


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
