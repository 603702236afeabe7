"""The tables of deferred messages and of finished steps."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

from oncely.stores.sql.table import BYTES, LONG, LONG_TEXT, TIME

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0002"
down_revision = "0001"

# No foreign keys: steps outlive a first claim that is released, and hand-written SQL may remove
# records. A table that exists already is from a migration that was killed.
_OPTIONS: dict[str, Any] = {
    "if_not_exists": True,
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
}


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the tables."""
    dialect = op.get_context().dialect.name
    id_type = sa.String(255, collation=found.collation)
    _create_deferred(name, id_type, sa.String(32, collation=found.collation))
    _create_steps(name, id_type)
    indexes = {
        "free": ["set_aside", "held_until", "id", "due_at"],
        "lane": ["lane", "set_aside", "id"],
    }
    # MySQL has no IF NOT EXISTS for indexes: there, people have to repair a migration that was
    # killed.
    options = {} if dialect == "mysql" and not found.is_mariadb else {"if_not_exists": True}
    for purpose, columns in indexes.items():
        index = name.index_of_deferred(purpose)
        op.create_index(index, name.deferred, columns, schema=name.schema, **options)


def _create_deferred(name: "TableName", id_type: sa.String, digest: sa.String) -> None:
    identity = [sa.Identity()] if op.get_context().dialect.name == "postgresql" else []
    op.create_table(
        name.deferred,
        sa.Column("id", LONG, *identity, primary_key=True, autoincrement=True),
        sa.Column("message_id", id_type, nullable=False),
        sa.Column("provider", id_type, nullable=False),
        sa.Column("name", digest, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("destination", id_type, nullable=False),
        sa.Column("deferred_id", id_type, nullable=False),
        sa.Column("type", LONG_TEXT, nullable=False),
        sa.Column("body", BYTES, nullable=False),
        sa.Column("headers", LONG_TEXT, nullable=False),
        sa.Column("source", LONG_TEXT, nullable=False),
        sa.Column("sent_at", sa.String(64)),
        sa.Column("content_type", LONG_TEXT, nullable=False),
        sa.Column("ordering_key", LONG_TEXT),
        sa.Column("lane", digest, nullable=False),
        sa.Column("delay_s", sa.Double(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("held_until", TIME, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("error", LONG_TEXT),
        sa.Column("set_aside", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.UniqueConstraint("message_id", "provider", "name", name=name.index_of_deferred("name")),
        schema=name.schema,
        # A number is never used twice: a late write must not hit another message.
        sqlite_autoincrement=True,
        **_OPTIONS,
    )


def _create_steps(name: "TableName", id_type: sa.String) -> None:
    op.create_table(
        name.steps,
        sa.Column("message_id", id_type, primary_key=True),
        sa.Column("provider", id_type, primary_key=True),
        sa.Column("name", id_type, primary_key=True),
        sa.Column("result", LONG_TEXT, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        schema=name.schema,
        **_OPTIONS,
    )
