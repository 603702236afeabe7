"""Writes that are safe to repeat: existing rows are updated, others are inserted."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Insert,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    and_,
    func,
    literal_column,
    or_,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from oncely.core.errors import ConfigError

Row = Mapping[str, Any]

_TWO_ROWS = "(SELECT NULL UNION ALL SELECT NULL)"
_SEVERAL_ROWS = 1242
"""What MariaDB and MySQL call that, where it stands for a value."""
_DUPLICATE = 1062


def upsert(
    connection: Connection | Session,
    table: Table | type,
    rows: Row | Sequence[Row],
    key: str | Sequence[str],
    update: str | Sequence[str] | None = None,
    sequence_by: str | None = None,
) -> None:
    """Insert rows into a table, or update existing rows with the same `key`.

    `table` is a Table or a mapped class. `key` names the columns of its primary key or of a unique
    constraint. `update` names the columns to update: without it, all given columns but the key's;
    an empty one updates none. Of rows with one key the last counts. With `sequence_by`, one of the
    updated columns, the row with the largest value in it counts, stored or given. Nothing is
    committed.

    Raises ConfigError for columns that do not fit the table or each other, and for other databases.
    An error of the database is raised as it is, such as IntegrityError where a row with another
    `key` has a value that another unique constraint allows once.
    """
    target = getattr(table, "__table__", table)
    if not isinstance(target, Table):
        raise ConfigError(f"upsert: {table!r} is neither a Table nor a mapped class")
    given = [rows] if isinstance(rows, Mapping) else list(rows)
    if not given:
        return
    columns, keys = list(given[0]), _names(key)
    for row in given:
        if row.keys() != given[0].keys():
            raise ConfigError(f"upsert: one row has the columns {columns}, another {list(row)}")
    renewed = [name for name in columns if name not in keys] if update is None else _names(update)
    check_columns(target, columns, keys, renewed, sequence_by)
    for name in [*keys, sequence_by] if sequence_by else keys:
        # In a unique constraint no null equals another: the row would be inserted each time. And
        # null has no order.
        if any(row[name] is None for row in given):
            raise ConfigError(f"upsert: {name!r} is None in a row; it needs a value in each")
    dialect = _dialect_of(connection, target)
    statement = _statement(dialect.name, target, keys, renewed, sequence_by)
    # One order for all writers, so that no two of them wait for each other.
    given.sort(key=lambda row: [str(row[name]) for name in keys])
    try:
        connection.execute(statement, [dict(row) for row in given])
    except DBAPIError as error:
        if not (error.orig and error.orig.args[:1] == (_SEVERAL_ROWS,)):
            raise
        known: Any = dialect.loaded_dbapi
        text = f"a row with another {', '.join(keys)} has the value of a unique column"
        other, hides = known.IntegrityError(_DUPLICATE, text), error.hide_parameters
        raise IntegrityError(error.statement, error.params, other, hide_parameters=hides) from error


def _dialect_of(connection: Connection | Session, table: Table) -> Dialect:
    if isinstance(connection, Session):
        return connection.get_bind(clause=table).dialect
    if isinstance(connection, Connection):
        return connection.dialect
    raise ConfigError(
        f"upsert: {type(connection).__name__} is neither a Connection nor a Session; "
        "for an async one write: await connection.run_sync(upsert, table, rows, key)"
    )


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def check_columns(
    table: Table,
    columns: Sequence[str],
    key: Sequence[str],
    update: Sequence[str],
    sequence_by: str | None,
) -> None:
    """Raise ConfigError where rows with these columns cannot be upserted."""
    for name in (*columns, *key, *update):
        if name not in table.c:
            raise ConfigError(f"upsert: the table {table.name} has no column {name!r}")
    if missing := [name for name in key if name not in columns]:
        raise ConfigError(f"upsert: the rows lack {missing} of the key")
    # MariaDB and MySQL would not report that, and would insert the row once more.
    kinds = PrimaryKeyConstraint | UniqueConstraint
    unique = [each.columns for each in table.constraints if isinstance(each, kinds)]
    unique += [index.columns for index in table.indexes if index.unique]
    if not key or {*key} not in [{column.key for column in columns} for columns in unique]:
        raise ConfigError(
            f"upsert: {list(key)} is neither the primary key nor a unique constraint "
            f"of the table {table.name}, as it is declared"
        )
    if sequence_by is not None and sequence_by not in update:
        raise ConfigError(
            f"upsert: sequence_by={sequence_by!r} is not a column that is updated;"
            f" name one of {', '.join(update)}"
        )


def _statement(
    dialect: str, table: Table, key: Sequence[str], update: Sequence[str], sequence_by: str | None
) -> Insert:
    columns = [table.c[name] for name in key]
    match dialect:
        case "postgresql" | "sqlite":
            insert: postgresql.Insert | sqlite.Insert
            insert = (postgresql if dialect == "postgresql" else sqlite).insert(table)
            if not update:
                return insert.on_conflict_do_nothing(index_elements=columns)
            renewed = {name: insert.excluded[name] for name in update}
            newest = None
            if sequence_by is not None:
                newest = _is_newest(table.c[sequence_by], insert.excluded[sequence_by])
            return insert.on_conflict_do_update(index_elements=columns, set_=renewed, where=newest)
        case "mysql" | "mariadb":
            return _statement_of_mysql(table, key, update, sequence_by)
        case _:
            raise ConfigError(
                f"upsert: {dialect} is not supported; use PostgreSQL, SQLite, MariaDB or MySQL"
            )


def _statement_of_mysql(
    table: Table, key: Sequence[str], update: Sequence[str], sequence_by: str | None
) -> Insert:
    statement = mysql.insert(table)
    given = statement.inserted
    # Any unique key finds a row, and one that has another `key` must not be overwritten: that is an
    # error of the subquery. INSERT IGNORE would hide other errors as well.
    is_same = and_(*(table.c[name] == given[name] for name in key))
    first = table.c[key[0]]
    renewed: list[tuple[str, Any]] = [(key[0], func.if_(is_same, first, literal_column(_TWO_ROWS)))]
    newest = None if sequence_by is None else _is_newest(table.c[sequence_by], given[sequence_by])
    # Columns are updated one after another, and the condition has to see the old value: so the
    # column of the condition comes last.
    for name in sorted(update, key=lambda name: name == sequence_by):
        value = given[name] if newest is None else func.if_(newest, given[name], table.c[name])
        renewed.append((name, value))
    return statement.on_duplicate_key_update(renewed)


def _is_newest(stored: ColumnElement[Any], given: ColumnElement[Any]) -> ColumnElement[bool]:
    return or_(stored.is_(None), stored <= given)
