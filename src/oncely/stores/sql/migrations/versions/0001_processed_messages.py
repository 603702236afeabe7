"""The table processed_messages; one that was made by hand is taken over."""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import mysql, postgresql

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
    types = _types(dialect, is_mariadb=found.is_mariadb)
    if found.columns is None:
        _create(name, dialect, types)
    else:
        _take_over(name, dialect, types, found)


def _types(dialect: str, *, is_mariadb: bool) -> dict[str, Any]:
    # Ids that differ by case or by a space at the end are two ids: so bytes are compared.
    binary = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
    match dialect:
        case "postgresql":
            return {
                "id": sa.String(255, collation="C"),
                "long": sa.BigInteger(),
                "time": sa.TIMESTAMP(timezone=True),
                "json": postgresql.JSONB(),
                "text": sa.Text(),
            }
        case "mysql" | "mariadb":
            return {
                "id": sa.String(255, collation=binary),
                "long": sa.BigInteger(),
                "time": mysql.DATETIME(fsp=6),
                "json": sa.JSON(),
                "text": mysql.LONGTEXT(),
            }
        case _:
            return {
                "id": sa.String(255),
                "long": sa.Integer(),
                "time": sa.Float(),
                "json": sa.Text(),
                "text": sa.Text(),
            }


def _create(name: "TableName", dialect: str, types: dict[str, Any]) -> None:
    now = {
        "postgresql": sa.text("now()"),
        "mysql": sa.text("CURRENT_TIMESTAMP(6)"),
        "mariadb": sa.text("CURRENT_TIMESTAMP(6)"),
    }.get(dialect)
    key: list[Any]
    if dialect == "postgresql":
        # One index is half the work of two: `id` is there to be read, and nothing looks it up.
        id_ = sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False)
        key = [sa.PrimaryKeyConstraint("message_id", "provider", name=name.unique)]
    else:
        id_ = sa.Column("id", types["long"], primary_key=True, autoincrement=True)
        key = [sa.UniqueConstraint("message_id", "provider", name=name.unique)]
    op.create_table(
        name.table,
        id_,
        sa.Column("message_id", types["id"], nullable=False),
        sa.Column("provider", types["id"], nullable=False),
        sa.Column("status", sa.String(50), nullable=False, server_default="processing"),
        sa.Column("attempts", sa.Integer(), server_default="1"),
        sa.Column("first_processed_at", types["time"], nullable=False, server_default=now),
        sa.Column("last_processed_at", types["time"], nullable=False, server_default=now),
        sa.Column("metadata", types["json"]),
        *_added(types),
        *key,
        schema=name.schema,
        # Half of each page stays free: an update then stays on its page, and leaves the index be.
        postgresql_with={"fillfactor": 50},
        mysql_engine="InnoDB",
        mysql_charset="utf8mb4",
    )


def _added(types: dict[str, Any]) -> list[sa.Column[Any]]:
    """The columns that a table made by hand does not have."""
    return [
        sa.Column("fence", types["long"], nullable=False, server_default="1"),
        sa.Column("version", types["long"], nullable=False, server_default="0"),
        sa.Column("lease_until", types["time"]),
        sa.Column("fingerprint", sa.String(64)),
        sa.Column("result", types["text"]),
        sa.Column("exhausted", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.Column("duplicates", types["long"], nullable=False, server_default="0"),
    ]


def _take_over(name: "TableName", dialect: str, types: dict[str, Any], found: "Found") -> None:
    for column in _added(types):
        if column.name not in (found.columns or ()):
            op.add_column(name.table, column, schema=name.schema)
    match dialect:
        case "postgresql":
            _change_postgresql(name, types)
        case "mysql" | "mariadb":
            _change_mysql(name, types, found)
        case _:
            _change_sqlite(name)


def _change_postgresql(name: "TableName", types: dict[str, Any]) -> None:
    # A conflict uses up an id as well: 32 bits are soon used up.
    changes = {"id": types["long"], **dict.fromkeys(_KEY, types["id"])}
    # What was written without a time zone is in that of the session.
    changes |= dict.fromkeys(_TIMES, types["time"])
    for column, type_ in changes.items():
        op.alter_column(name.table, column, type_=type_, schema=name.schema)
    table = f'"{name.schema}"."{name.table}"' if name.schema else f'"{name.table}"'
    sequence = f"pg_get_serial_sequence('{table}', 'id')"
    op.execute(
        f"DO $$ BEGIN IF {sequence} IS NOT NULL THEN"
        f" EXECUTE 'ALTER SEQUENCE ' || {sequence} || ' AS bigint'; END IF; END $$"
    )


def _change_mysql(name: "TableName", types: dict[str, Any], found: "Found") -> None:
    def change(column: str, type_: Any, **options: Any) -> None:
        options["existing_nullable"] = False
        op.alter_column(name.table, column, type_=type_, schema=name.schema, **options)

    change("id", types["long"], autoincrement=True)
    for column in _KEY:
        change(column, types["id"])
    now = "CURRENT_TIMESTAMP(6)"
    renewed = f"{now} ON UPDATE {now}"
    for column in _TIMES:
        # Old servers gave the first TIMESTAMP of a table an ON UPDATE that nobody asked for.
        is_renewed = column != _TIMES[0] and "ON UPDATE" in (found.defaults[column] or "").upper()
        change(column, types["time"], server_default=sa.text(renewed if is_renewed else now))


def _change_sqlite(name: "TableName") -> None:
    # SQLite cannot change a column's type, and does not need to.
    for column in _TIMES:
        op.execute(
            f'UPDATE "{name.table}" SET {column} = (julianday({column}) - 2440587.5) * 86400'
            f" WHERE typeof({column}) = 'text'"
        )
