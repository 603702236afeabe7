"""For operators: an index of what is not completed; activity, workers, runs, audit."""

from typing import TYPE_CHECKING

import sqlalchemy as sa
from alembic import op

from oncely.stores.sql.table import (
    activity_columns,
    audit_columns,
    run_columns,
    times_only,
    worker_columns,
)

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0006"
down_revision = "0005"


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the tables and the index."""
    dialect = op.get_context().dialect.name
    text = sa.String(255, collation=found.collation)
    for table, columns in (
        (name.activity, activity_columns(text)),
        (name.workers, worker_columns(text)),
        (name.runs, run_columns(text)),
        (name.audit, audit_columns(text)),
    ):
        op.create_table(
            table,
            *columns,
            *times_only(columns, dialect),
            schema=name.schema,
            # One that is there was begun by a migration that was killed.
            if_not_exists=True,
            mysql_engine="InnoDB",
            mysql_charset="utf8mb4",
        )
    if dialect == "mysql":
        return  # It has no indexes of some rows.
    op.create_index(
        name.unfinished,
        name.table,
        ["status"],
        schema=name.schema,
        # It may have been made by hand before, without keeping others from writing.
        if_not_exists=True,
        postgresql_where=sa.text("status <> 'sent'"),
        sqlite_where=sa.text("status <> 'sent'"),
    )
