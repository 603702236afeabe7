"""Which worker holds a claim, which worker has ended, and how far its consumer is behind."""

from typing import TYPE_CHECKING

from alembic import context, op
from sqlalchemy import inspect

from oncely.stores.sql.table import tables

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0008"
down_revision = "0007"


def upgrade(name: "TableName", found: "Found") -> None:
    """Add the columns to tables that no migration before this one makes or has just made."""
    ours = tables(name, op.get_context().dialect.name, found.collation)
    there = inspect(context.config.attributes["connection"])
    for table, columns in (
        (ours.records, ("worker",)),
        (ours.workers, ("number", "ended", "lags")),
    ):
        if there.has_table(table.name, schema=name.schema):
            names = {column["name"] for column in there.get_columns(table.name, name.schema)}
            for each in columns:
                # One that was made by hand has no fence either: what is shown as SQL has not yet
                # been done, and the first migration adds both.
                if each not in names and names & {"fence", "seen"}:
                    op.add_column(table.name, table.c[each], schema=name.schema)
