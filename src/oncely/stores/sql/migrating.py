"""The schema: brought up to date, shown as SQL, and compared with what it should be."""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Table, inspect

from oncely.stores.sql.table import TableName


class Found(NamedTuple):
    """What stands in the database before the migrations run."""

    columns: frozenset[str] | None
    """Those of the table; None where there is none."""
    defaults: Mapping[str, Any]
    is_mariadb: bool


def upgrade(connection: Connection, name: TableName) -> None:
    """Run the migrations that are missing."""
    config = _config(connection, name)
    if _revision(connection, name) != _head(config):
        command.upgrade(config, "head")


def upgrade_sql(connection: Connection, name: TableName) -> str:
    """What `upgrade` would run now."""
    config = _config(connection, name)
    revision = _revision(connection, name)
    if revision == _head(config):
        return ""
    config.output_buffer = io.StringIO()
    command.upgrade(config, f"{revision}:head" if revision else "head", sql=True)
    return config.output_buffer.getvalue()


def drift(connection: Connection, name: TableName, table: Table) -> list[str]:
    """How the table differs from what the migrations make, a sentence each."""
    revision, head = _revision(connection, name), _head(_config(connection, name))
    if not inspect(connection).has_table(name.table, schema=name.schema):
        return [f"there is no table {name.table}; type: oncely migrate"]
    if revision != head:
        return [
            f"{name.table} is at migration {revision or 'none'} of {head}; type: oncely migrate"
        ]
    options = {
        "include_schemas": name.schema is not None,
        "include_name": lambda what, kind, _: kind != "table" or what == name.table,
        "compare_type": True,
    }
    context = MigrationContext.configure(connection, opts=options)
    return [text for diff in compare_metadata(context, table.metadata) for text in _told(diff)]


def _told(diff: Any) -> list[str]:
    """A difference in words; what the table has beyond ours is its owner's."""
    if isinstance(diff, list):
        return [text for part in diff for text in _told(part)]
    match diff:
        case ("add_column", _, table, column):
            return [f"{table}: the column {column.name} is missing"]
        case ("modify_type", _, table, column, _, is_now, should_be):
            return [f"{table}: {column} is of type {is_now!r} and should be {should_be!r}"]
        case ("modify_nullable", _, table, column, *_, should_be):
            return [f"{table}: {column} should {'' if should_be else 'not '}be nullable"]
        case ("add_constraint", constraint):
            return [f"{constraint.table.name}: the constraint {constraint.name} is missing"]
        case _:
            return []


def _config(connection: Connection, name: TableName) -> Config:
    config = Config()
    config.set_main_option("script_location", "oncely.stores.sql:migrations")
    config.attributes.update(connection=connection, name=name, found=_found(connection, name))
    return config


def _found(connection: Connection, name: TableName) -> Found:
    is_mariadb = getattr(connection.dialect, "is_mariadb", False)
    inspector = inspect(connection)
    if not inspector.has_table(name.table, schema=name.schema):
        return Found(None, {}, is_mariadb)
    columns = inspector.get_columns(name.table, schema=name.schema)
    defaults = {column["name"]: column["default"] for column in columns}
    return Found(frozenset(defaults), defaults, is_mariadb)


def _revision(connection: Connection, name: TableName) -> str | None:
    options = {"version_table": name.version_table, "version_table_schema": name.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _head(config: Config) -> Sequence[str] | str | None:
    return ScriptDirectory.from_config(config).get_current_head()
