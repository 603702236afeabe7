"""One table for all waiting messages, in place of the one for messages to be sent."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

from oncely.stores.sql.table import BYTES, LONG, LONG_TEXT, TIME, times_only

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0004"
down_revision = "0003"

_TAKEN_OVER = (
    *("message_id", "provider", "name", "position", "destination", "type", "body", "headers"),
    *("source", "sent_at", "content_type", "ordering_key", "lane", "delay_s", "created_at"),
    *("due_at", "held_until", "attempts", "error", "set_aside"),
)


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the table, and move the waiting messages into it."""
    context = op.get_context()
    dialect = context.dialect.name
    _create(name, sa.String(255, collation=found.collation), found.collation)
    indexes = {
        "free": ["queue", "set_aside", "held_until", "id"],
        "lane": ["lane", "set_aside", "id"],
    }
    # MySQL has no IF NOT EXISTS for indexes: there, people have to repair a migration that was
    # killed.
    options = {} if dialect == "mysql" and not found.is_mariadb else {"if_not_exists": True}
    for purpose, columns in indexes.items():
        index = name.index_of_waiting(purpose)
        op.create_index(index, name.waiting, columns, schema=name.schema, **options)
    if not context.as_sql and not sa.inspect(op.get_bind()).has_table(name.deferred, name.schema):
        return  # Moved already, by a migration that was killed before it recorded its revision.
    if dialect == "postgresql":
        # Nobody defers messages between the move and the drop: they find no table, and try again.
        op.execute(f"LOCK TABLE {_quoted(name, name.deferred)} IN ACCESS EXCLUSIVE MODE")
    _move(name, dialect)
    op.drop_table(name.deferred, schema=name.schema)


def _create(name: "TableName", id_type: sa.String, collation: str | None) -> None:
    digest = sa.String(32, collation=collation)
    identity = [sa.Identity()] if op.get_context().dialect.name == "postgresql" else []
    columns: list[sa.Column[Any]] = [
        sa.Column("id", LONG, *identity, primary_key=True, autoincrement=True),
        sa.Column("queue", id_type, nullable=False),
        sa.Column("message_id", id_type, nullable=False),
        sa.Column("provider", id_type, nullable=False),
        sa.Column("name", digest, nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("destination", id_type, nullable=False),
        sa.Column("own_id", id_type, nullable=False),
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
        sa.Column("updated_at", TIME, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("held_until", TIME, nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("error", LONG_TEXT),
        sa.Column("reason", LONG_TEXT),
        sa.Column("set_aside", sa.Boolean(), nullable=False, server_default=sa.false()),
    ]
    op.create_table(
        name.waiting,
        *columns,
        *times_only(columns, op.get_context().dialect.name),
        sa.UniqueConstraint("message_id", "provider", "name", name=name.index_of_waiting("name")),
        schema=name.schema,
        # A number is never used twice: a late write must not hit another message.
        sqlite_autoincrement=True,
        # A table that exists already is from a migration that was killed.
        if_not_exists=True,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
    )


def _move(name: "TableName", dialect: str) -> None:
    ignore = "INSERT IGNORE" if dialect == "mysql" else "INSERT"
    conflict = "" if dialect == "mysql" else " ON CONFLICT DO NOTHING"
    columns = ", ".join(_TAKEN_OVER)
    op.execute(
        f"{ignore} INTO {_quoted(name, name.waiting)}"
        f" ({columns}, queue, own_id, updated_at, reason)"
        f" SELECT {columns}, 'send', deferred_id, created_at,"
        " CASE WHEN set_aside THEN error ELSE NULL END"
        f" FROM {_quoted(name, name.deferred)} WHERE id > 0 ORDER BY id{conflict}"
    )


def _quoted(name: "TableName", table: str) -> str:
    quote = op.get_context().dialect.identifier_preparer.quote_identifier
    return f"{quote(name.schema)}.{quote(table)}" if name.schema else quote(table)
