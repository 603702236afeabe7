"""The table processed_messages; one that was made by hand is taken over."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import CreateTable

from oncely.stores.sql.table import tables

if TYPE_CHECKING:
    from oncely.stores.names import TableName
    from oncely.stores.sql.migrating import Found

revision = "0001"
down_revision = None

_KEY = ("message_id", "provider")
_TIMES = ("first_processed_at", "last_processed_at")


def upgrade(name: "TableName", found: "Found") -> None:
    """Create the table, or add what it lacks."""
    dialect = op.get_context().dialect.name
    records = tables(name, dialect, found.collation).records
    if found.columns is None:
        op.execute(CreateTable(records))
        return
    for column in records.c:
        if column.name not in found.columns:
            op.add_column(name.table, column, schema=name.schema)
    match dialect:
        case "postgresql":
            _change_postgresql(name, records)
        case "mysql":
            _change_mysql(name, records, found)
        case _:
            # SQLite cannot change a column's type, and does not need to.
            for time in _TIMES:
                op.execute(
                    f'UPDATE "{name.table}" SET {time} = (julianday({time}) - 2440587.5) * 86400'
                    f" WHERE typeof({time}) = 'text'"
                )


def _change_postgresql(name: "TableName", records: sa.Table) -> None:
    # A conflict uses up an id as well: 32 bits are soon used up. Times that were written without a
    # time zone are taken to be in the session's.
    for column in ("id", *_KEY, *_TIMES):
        op.alter_column(name.table, column, type_=records.c[column].type, schema=name.schema)
    table = f'"{name.schema}"."{name.table}"' if name.schema else f'"{name.table}"'
    sequence = f"pg_get_serial_sequence('{table}', 'id')"
    op.execute(
        f"DO $$ BEGIN IF {sequence} IS NOT NULL THEN"
        f" EXECUTE 'ALTER SEQUENCE ' || {sequence} || ' AS bigint'; END IF; END $$"
    )


def _change_mysql(name: "TableName", records: sa.Table, found: "Found") -> None:
    def change(column: str, **options: Any) -> None:
        options |= {"type_": records.c[column].type, "existing_nullable": False}
        op.alter_column(name.table, column, schema=name.schema, **options)

    change("id", autoincrement=True)
    for column in _KEY:
        change(column)
    now = "CURRENT_TIMESTAMP(6)"
    renewed = f"{now} ON UPDATE {now}"
    for column in _TIMES:
        # Old servers gave the first TIMESTAMP of a table an ON UPDATE that nobody asked for.
        is_renewed = column != _TIMES[0] and "ON UPDATE" in (found.defaults[column] or "").upper()
        change(column, server_default=sa.text(renewed if is_renewed else now))
