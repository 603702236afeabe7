"""The schema: brought up to date, shown as SQL, and compared with what it should be."""

import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from oncely.core.errors import StoreError
from oncely.stores.names import TableName
from oncely.stores.sql.dialect import OwnTables
from oncely.stores.sql.revision import HEAD
from oncely.stores.sql.table import SqlTables

_KEY = {"message_id", "provider"}
_BINDING = {"queue", "exchange", "pattern"}
_NAMING = {*_KEY, *_BINDING, "name", "destination", "own_id"}
"""The columns that identify rows."""
_HAND_WRITTEN = {
    *("id", *_KEY, "status", "attempts", "metadata", "first_processed_at", "last_processed_at")
}
"""The columns that a table made by hand must have, to be taken over."""
_EXACT = ("nopad_bin", "0900_bin")
"""Endings of collations of MariaDB and MySQL that compare texts exactly. Other databases always do.
"""


class Found(NamedTuple):
    """What the database has before the migrations run."""

    columns: frozenset[str] | None
    """The columns of the table; None where there is no table."""
    defaults: Mapping[str, Any]
    is_mariadb: bool
    collation: str | None
    """The collation of ids. Ids that differ only in case or in a space at the end are different, so
    it compares bytes."""
    lacks_schema: bool
    """Whether a PostgreSQL schema has to be created. In MariaDB it would be a whole database."""


def upgrade(at: OwnTables, name: TableName) -> None:
    """Run the migrations that are missing. Raises KeysLocked where a lock for that is held."""
    with at.dialect.migrating(at.link), ExitStack() as opened:
        with at.dialect.altering(at.link):
            config = opened.enter_context(_config(at.link, name))
            if _known_revision(at.link, name, config) == HEAD:
                return
        if config.attributes["found"].columns is not None:
            at.dialect.index_beside(at.link)
        with at.dialect.altering(at.link):
            command.upgrade(config, "head")


def upgrade_sql(connection: Connection, name: TableName) -> str:
    """The SQL that `upgrade` would run now."""
    with _config(connection, name) as config:
        revision = _known_revision(connection, name, config)
        if revision == HEAD:
            return ""
        config.output_buffer = io.StringIO()
        command.upgrade(config, f"{revision}:head" if revision else "head", sql=True)
        return config.output_buffer.getvalue()


def drift(connection: Connection, name: TableName, tables: SqlTables) -> list[str]:
    """How the tables differ from what the migrations make, a sentence each."""
    with _config(connection, name) as config:
        revision = _revision(connection, name)
        is_known = _is_known(config, revision)
    if not inspect(connection).has_table(name.table, schema=name.schema):
        return [f"there is no table {name.table}; type: oncely migrate"]
    if not is_known:
        return [_too_new(name, revision)]
    if revision != HEAD:
        return [
            f"{name.table} is at migration {revision or 'none'} of {HEAD}; type: oncely migrate"
        ]
    ours = {table.name for table in tables}
    if missing := ours - {*inspect(connection).get_table_names(schema=name.schema)}:
        return [f"{name.table}: its table {table} is missing" for table in sorted(missing)]
    options = {
        "include_schemas": name.schema is not None,
        "include_name": lambda what, kind, _: kind != "table" or what in ours,
        "compare_type": True,
    }
    context = MigrationContext.configure(connection, opts=options)
    differences = compare_metadata(context, tables.records.metadata)
    if connection.dialect.name == "sqlite":
        # Lists are changes of a column's type, which SQLite does not enforce.
        differences = [diff for diff in differences if not isinstance(diff, list)]
    return [*chain(*map(_told, differences)), *_loose_keys(connection, name, tables)]


def _told(diff: Any) -> list[str]:
    """A difference in words. Further columns or indexes in the table are its owner's."""
    if isinstance(diff, list):
        return [text for part in diff for text in _told(part)]
    match diff:
        case ("add_index", index):
            return [f"{index.table.name}: the index {index.name} is missing"]
        case ("add_column", _, table, column):
            return [f"{table}: the column {column.name} is missing"]
        case ("modify_type", _, table, column, _, is_now, should_be):
            return [f"{table}: {column} is of type {is_now!r} and should be {should_be!r}"]
        case ("modify_nullable", _, table, column, *_, should_be):
            return [f"{table}: {column} should {'' if should_be else 'not '}be nullable"]
        case _:
            return []


def _loose_keys(connection: Connection, name: TableName, tables: SqlTables) -> Iterator[str]:
    """Keys and collations by which one message could count as two, or two as one."""
    keys = (
        *(_KEY, _KEY | {"name"}, _KEY | {"name"}, {"provider"}, _BINDING),
        *({"provider", "worker", "began"}, {"id"}, {"id"}, {"id"}),
    )
    inspector = inspect(connection)
    for table, key in zip(tables, keys, strict=True):
        primary = inspector.get_pk_constraint(table.name, name.schema)["constrained_columns"]
        unique = inspector.get_unique_constraints(table.name, name.schema)
        if key not in [set(primary), *(set(constraint["column_names"]) for constraint in unique)]:
            those = " and ".join(c.name for c in table.c if c.name in key)
            yield f"{table.name}: there is no unique constraint on {those}"
        if connection.dialect.name != "mysql":
            continue
        for column in inspector.get_columns(table.name, name.schema):
            collation = getattr(column["type"], "collation", None)
            if column["name"] in _NAMING and not str(collation).endswith(_EXACT):
                yield (
                    f"{table.name}: {column['name']} has the collation {collation}, by which "
                    "different ids may be equal"
                )


@contextmanager
def _config(connection: Connection, name: TableName) -> Iterator[Config]:
    config = Config()
    config.attributes.update(connection=connection, name=name, found=_found(connection, name))
    with _scripts() as folder:
        config.set_main_option("script_location", str(folder).replace("%", "%%"))
        yield config


@contextmanager
def _scripts() -> Iterator[Path]:
    """The folder of the migrations, for Alembic to read: a copy where the package is in a zip."""
    packed = files("oncely.stores.sql") / "migrations"
    if isinstance(packed, Path):
        yield packed
        return
    with TemporaryDirectory() as folder:
        _unpack(packed, Path(folder, "migrations"))
        yield Path(folder, "migrations")


def _unpack(packed: Traversable, to: Path) -> None:
    to.mkdir()
    for each in packed.iterdir():
        if each.is_dir():
            _unpack(each, to / each.name)
        else:
            (to / each.name).write_bytes(each.read_bytes())


def _found(connection: Connection, name: TableName) -> Found:
    is_mariadb = getattr(connection.dialect, "is_mariadb", False)
    binary = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
    collation = {"postgresql": "C", "mysql": binary}.get(connection.dialect.name)
    inspector = inspect(connection)
    can_create = connection.dialect.name == "postgresql" and name.schema is not None
    lacks_schema = can_create and name.schema not in inspector.get_schema_names()
    if not inspector.has_table(name.table, schema=name.schema):
        return Found(None, {}, is_mariadb, collation, lacks_schema)
    columns = inspector.get_columns(name.table, schema=name.schema)
    defaults = {column["name"]: column["default"] for column in columns}
    return Found(frozenset(defaults), defaults, is_mariadb, collation, lacks_schema)


def _revision(connection: Connection, name: TableName) -> str | None:
    options = {"version_table": name.version_table, "version_table_schema": name.schema}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def _known_revision(connection: Connection, name: TableName, config: Config) -> str | None:
    revision = _revision(connection, name)
    if not _is_known(config, revision):
        raise StoreError(_too_new(name, revision))
    found: Found = config.attributes["found"]
    if revision is None and found.columns is not None and not found.columns >= _HAND_WRITTEN:
        lacks = ", ".join(sorted(_HAND_WRITTEN - found.columns))
        raise StoreError(
            f"{name.table} is a table of another program, without {lacks}: choose another name"
        )
    return revision


def _is_known(config: Config, revision: str | None) -> bool:
    scripts = ScriptDirectory.from_config(config).walk_revisions()
    return revision is None or revision in {script.revision for script in scripts}


def _too_new(name: TableName, revision: str | None) -> str:
    return f"{name.table} is at migration {revision} of a newer oncely; install that version"
