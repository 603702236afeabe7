"""The table of consumers: how long the records of each are kept, and its horizon."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

from oncely.stores.sql.table import times_only

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0003"
down_revision = "0002"


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the table."""
    columns: list[sa.Column[Any]] = [
        sa.Column("provider", sa.String(255, collation=found.collation), primary_key=True),
        sa.Column("retention_s", sa.Double()),
        sa.Column("forgotten_until", sa.Double()),
    ]
    op.create_table(
        name.consumers,
        *columns,
        *times_only(columns, op.get_context().dialect.name),
        schema=name.schema,
        # A table that exists already is from a migration that was killed.
        if_not_exists=True,
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
    )
