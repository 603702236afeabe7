"""What each kind of program needs of a ledger's tables, and what the role of a session lacks."""

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import Column, MetaData, String, Table

from oncely.stores.names import Program, TableName
from oncely.stores.sql.table import SqlTables

_EACH = ("SELECT", "INSERT", "UPDATE", "DELETE")
_ALL = _EACH[1:]
_WORKER = {
    "records": _ALL,
    "waiting": _ALL,
    "steps": _ALL[:1],
    "consumers": _ALL[:2],
    "bindings": _ALL[:1],
    "activity": _ALL[:2],
    "workers": _ALL,
    "audit": _ALL[:1],
}
WRITES: Mapping[Program, Mapping[str, Sequence[str]]] = {
    "worker": _WORKER,
    "spark": {**_WORKER, "runs": _ALL[:2]},
    "relay": {
        "records": _ALL[1:2],
        "waiting": _ALL[1:],
        "workers": _ALL,
        "audit": _ALL[:1],
    },
    "operator": {
        "records": _ALL[1:],
        "waiting": _ALL[1:],
        "steps": _ALL[2:],
        "consumers": _ALL[:2],
        "activity": _ALL,
        "workers": _ALL,
        "runs": _ALL[2:],
        "audit": _ALL[:2],
    },
    "reader": {},
}
"""What each kind of program writes, by the tables' names in SqlTables. It reads all tables."""


def needed(
    programs: Iterable[Program], tables: SqlTables, name: TableName
) -> list[tuple[str, Table]]:
    """The privileges that programs of these kinds need, each with its table."""
    schema = MetaData(schema=tables.records.schema)
    version = Table(name.version_table, schema, Column("version_num", String))
    named = {**tables._asdict(), "version": version}
    writes = [WRITES[program] for program in programs]
    return [
        (privilege, table)
        for field, table in named.items()
        for privilege in _EACH
        if privilege == "SELECT" or any(privilege in each.get(field, ()) for each in writes)
    ]
