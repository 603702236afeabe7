"""The table of queues and their bindings; an index of those lanes only that messages share."""

from typing import TYPE_CHECKING

import sqlalchemy as sa
from alembic import op

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0005"
down_revision = "0004"


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the table, and the index anew."""
    text = sa.String(255, collation=found.collation)
    op.create_table(
        name.bindings,
        sa.Column("queue", text, primary_key=True),
        sa.Column("exchange", text, primary_key=True),
        sa.Column("pattern", text, primary_key=True),
        schema=name.schema,
        # A table that exists already is from a migration that was killed.
        if_not_exists=True,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
    )
    if op.get_context().dialect.name == "mysql":
        return  # It has no indexes of some rows.
    index = name.index_of_waiting("lane")
    op.drop_index(index, name.waiting, schema=name.schema, if_exists=True)
    op.create_index(
        index,
        name.waiting,
        ["lane", "set_aside", "id"],
        schema=name.schema,
        postgresql_where=sa.text("lane <> name"),
        sqlite_where=sa.text("lane <> name"),
    )
