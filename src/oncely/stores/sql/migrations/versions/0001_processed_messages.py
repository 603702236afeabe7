"""The table processed_messages; one that was made by hand is taken over."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op

from oncely.stores.sql.table import JSON_TEXT, LONG, LONG_TEXT, TIME, times_only

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
    id_type = sa.String(255, collation=found.collation)
    if found.columns is None:
        _create(name, dialect, id_type)
    else:
        _take_over(name, dialect, id_type, found)


def _create(name: "TableName", dialect: str, id_type: sa.String) -> None:
    now = {"postgresql": sa.text("now()"), "mysql": sa.text("CURRENT_TIMESTAMP(6)")}.get(dialect)
    key: list[Any]
    if dialect == "postgresql":
        # One index is half the work of two: `id` is only read, and never looked up.
        id_ = sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False)
        key = [sa.PrimaryKeyConstraint("message_id", "provider", name=name.unique)]
    else:
        id_ = sa.Column("id", LONG, primary_key=True, autoincrement=True)
        key = [sa.UniqueConstraint("message_id", "provider", name=name.unique)]
    columns: list[sa.Column[Any]] = [
        id_,
        sa.Column("message_id", id_type, nullable=False),
        sa.Column("provider", id_type, nullable=False),
        sa.Column("status", sa.String(50), nullable=False, server_default="processing"),
        sa.Column("attempts", sa.Integer(), server_default="1"),
        sa.Column("first_processed_at", TIME, nullable=False, server_default=now),
        sa.Column("last_processed_at", TIME, nullable=False, server_default=now),
        sa.Column("metadata", JSON_TEXT),
        *_added(),
    ]
    op.create_table(
        name.table,
        *columns,
        *key,
        *times_only(columns, dialect),
        schema=name.schema,
        # Half of each page stays free: an update then stays on its page, and does not touch the
        # index.
        postgresql_with={"fillfactor": 50},
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
    )


def _added() -> list[sa.Column[Any]]:
    """The columns that a table made by hand does not have."""
    return [
        sa.Column("fence", LONG, nullable=False, server_default="1"),
        sa.Column("version", LONG, nullable=False, server_default="0"),
        sa.Column("lease_until", TIME),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("result", LONG_TEXT),
        sa.Column("exhausted", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("duplicates", LONG, nullable=False, server_default="0"),
    ]


def _take_over(name: "TableName", dialect: str, id_type: sa.String, found: "Found") -> None:
    for column in _added():
        if column.name not in (found.columns or ()):
            op.add_column(name.table, column, schema=name.schema)
    match dialect:
        case "postgresql":
            _change_postgresql(name, id_type)
        case "mysql":
            _change_mysql(name, id_type, found)
        case _:
            _change_sqlite(name)


def _change_postgresql(name: "TableName", id_type: sa.String) -> None:
    # A conflict uses up an id as well: 32 bits are soon used up.
    changes: dict[str, Any] = {"id": LONG, **dict.fromkeys(_KEY, id_type)}
    # Times that were written without a time zone are taken to be in the session's.
    changes |= dict.fromkeys(_TIMES, TIME)
    for column, type_ in changes.items():
        op.alter_column(name.table, column, type_=type_, schema=name.schema)
    table = f'"{name.schema}"."{name.table}"' if name.schema else f'"{name.table}"'
    sequence = f"pg_get_serial_sequence('{table}', 'id')"
    op.execute(
        f"DO $$ BEGIN IF {sequence} IS NOT NULL THEN"
        f" EXECUTE 'ALTER SEQUENCE ' || {sequence} || ' AS bigint'; END IF; END $$"
    )


def _change_mysql(name: "TableName", id_type: sa.String, found: "Found") -> None:
    def change(column: str, type_: Any, **options: Any) -> None:
        options["existing_nullable"] = False
        op.alter_column(name.table, column, type_=type_, schema=name.schema, **options)

    change("id", LONG, autoincrement=True)
    for column in _KEY:
        change(column, id_type)
    now = "CURRENT_TIMESTAMP(6)"
    renewed = f"{now} ON UPDATE {now}"
    for column in _TIMES:
        # Old servers gave the first TIMESTAMP of a table an ON UPDATE that nobody asked for.
        is_renewed = column != _TIMES[0] and "ON UPDATE" in (found.defaults[column] or "").upper()
        change(column, TIME, server_default=sa.text(renewed if is_renewed else now))


def _change_sqlite(name: "TableName") -> None:
    # SQLite cannot change a column's type, and does not need to.
    for column in _TIMES:
        op.execute(
            f'UPDATE "{name.table}" SET {column} = (julianday({column}) - 2440587.5) * 86400'
            f" WHERE typeof({column}) = 'text'"
        )
