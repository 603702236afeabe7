"""All that is beside the records: the other tables, and an index of what is not completed.

It is the second migration: those between were never in a release.
"""

from operator import attrgetter
from typing import TYPE_CHECKING

from alembic import op
from sqlalchemy.schema import CreateIndex, CreateTable

from oncely.stores.sql.table import tables

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0007"
down_revision = "0001"


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the tables and the indexes."""
    dialect = op.get_context().dialect.name
    records, *others = tables(name, dialect, found.collation)
    # What is there already is from a migration that was killed; an index of the records may have
    # been made by hand before, without keeping others from writing.
    for table in others:
        op.execute(CreateTable(table, if_not_exists=True))
    # MySQL has no IF NOT EXISTS for indexes: there, people have to repair a migration that was
    # killed.
    may_exist = dialect != "mysql" or found.is_mariadb
    for table in (records, *others):
        for index in sorted(table.indexes, key=attrgetter("name")):
            op.execute(CreateIndex(index, if_not_exists=may_exist))
