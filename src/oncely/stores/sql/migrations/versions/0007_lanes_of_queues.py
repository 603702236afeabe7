"""An index of the lanes of each queue, in place of one of all lanes: the first message of each is
found without reading those that wait behind it.
"""

from typing import TYPE_CHECKING

from alembic import op
from sqlalchemy.schema import CreateIndex

from oncely.stores.sql.table import tables

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0007"
down_revision = "0006"


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the index, and drop the former one."""
    if not found.has_waiting:
        # 0006 has just made the table as it now is.
        return
    dialect = op.get_context().dialect.name
    waiting = tables(name, dialect, found.collation).waiting
    [lanes] = [each for each in waiting.indexes if each.name == name.index_of_waiting("lanes")]
    # As in 0006.
    may_exist = dialect != "mysql" or found.is_mariadb
    op.execute(CreateIndex(lanes, if_not_exists=may_exist))
    former = name.index_of_waiting("lane")
    op.drop_index(former, waiting.name, schema=waiting.schema, if_exists=may_exist)
