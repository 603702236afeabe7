"""The tables of deferred messages and of finished steps."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0002"
down_revision = "0001"

# No foreign keys: steps outlive a first claim that is released, and hand-written SQL may remove
# records. A table that is there was begun by a migration that was killed.
_OPTIONS: dict[str, Any] = {
    "if_not_exists": True,
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
}


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the tables."""
    dialect = op.get_context().dialect.name
    types = _types(dialect, is_mariadb=found.is_mariadb)
    _create_deferred(name, types)
    _create_steps(name, types)
    indexes = {
        "free": ["set_aside", "held_until", "id", "due_at"],
        "lane": ["lane", "set_aside", "id"],
    }
    # MySQL has no such condition; there the schema is changed by people where that was cut off.
    options = {} if dialect == "mysql" and not found.is_mariadb else {"if_not_exists": True}
    for purpose, columns in indexes.items():
        index = name.index_of_deferred(purpose)
        op.create_index(index, name.deferred, columns, schema=name.schema, **options)


def _types(dialect: str, *, is_mariadb: bool) -> dict[str, Any]:
    # Ids that differ by case or by a space at the end are two ids: so bytes are compared.
    binary = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
    match dialect:
        case "postgresql":
            return {
                "id": sa.String(255, collation="C"),
                "digest": sa.String(32, collation="C"),
                "number": sa.BigInteger(),
                "time": sa.TIMESTAMP(timezone=True),
                "text": sa.Text(),
                "bytes": sa.LargeBinary(),
            }
        case "mysql" | "mariadb":
            return {
                "id": sa.String(255, collation=binary),
                "digest": sa.String(32, collation=binary),
                "number": sa.BigInteger(),
                "time": mysql.DATETIME(fsp=6),
                "text": mysql.LONGTEXT(),
                "bytes": mysql.LONGBLOB(),
            }
        case _:
            return {
                "id": sa.String(255),
                "digest": sa.String(32),
                "number": sa.Integer(),
                "time": sa.Float(),
                "text": sa.Text(),
                "bytes": sa.LargeBinary(),
            }


def _create_deferred(name: "TableName", types: dict[str, Any]) -> None:
    identity = [sa.Identity()] if op.get_context().dialect.name == "postgresql" else []
    op.create_table(
        name.deferred,
        sa.Column("id", types["number"], *identity, primary_key=True, autoincrement=True),
        sa.Column("message_id", types["id"], nullable=False),
        sa.Column("provider", types["id"], nullable=False),
        sa.Column("name", types["digest"], nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("destination", types["id"], nullable=False),
        sa.Column("deferred_id", types["id"], nullable=False),
        sa.Column("type", types["text"], nullable=False),
        sa.Column("body", types["bytes"], nullable=False),
        sa.Column("headers", types["text"], nullable=False),
        sa.Column("source", types["text"], nullable=False),
        sa.Column("sent_at", sa.String(64)),
        sa.Column("content_type", types["text"], nullable=False),
        sa.Column("ordering_key", types["text"]),
        sa.Column("lane", types["digest"], nullable=False),
        sa.Column("delay_s", sa.Double(), nullable=False),
        sa.Column("created_at", types["time"], nullable=False),
        sa.Column("due_at", types["time"], nullable=False),
        sa.Column("held_until", types["time"], nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("error", types["text"]),
        sa.Column("set_aside", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("message_id", "provider", "name", name=name.index_of_deferred("name")),
        schema=name.schema,
        # A number is never given twice: what was sent late must not stand for another.
        sqlite_autoincrement=True,
        **_OPTIONS,
    )


def _create_steps(name: "TableName", types: dict[str, Any]) -> None:
    op.create_table(
        name.steps,
        sa.Column("message_id", types["id"], primary_key=True),
        sa.Column("provider", types["id"], primary_key=True),
        sa.Column("name", types["id"], primary_key=True),
        sa.Column("result", types["text"], nullable=False),
        sa.Column("created_at", types["time"], nullable=False),
        schema=name.schema,
        **_OPTIONS,
    )
