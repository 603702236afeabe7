"""Which migration a schema is at. Every worker asks that, so it does without Alembic, which is slow
to import.
"""

from sqlalchemy import Connection, column, inspect, select, table

from oncely.stores.names import TableName

HEAD = "0008"
"""The newest migration."""


def is_current(connection: Connection, name: TableName) -> bool:
    """Whether no migration is missing."""
    if not inspect(connection).has_table(name.version_table, schema=name.schema):
        return False
    revision = table(name.version_table, column("version_num"), schema=name.schema)
    return connection.execute(select(revision)).scalars().all() == [HEAD]
