"""What each kind of program needs of a ledger's tables: docs/reference/privileges.md shows it."""

from collections.abc import Iterable, Mapping

from sqlalchemy import Column, MetaData, String, Table

from oncely.stores.names import Program, TableName
from oncely.stores.sql.table import SqlTables

_WORKER = {
    "records": "INSERT UPDATE DELETE",
    "waiting": "INSERT UPDATE DELETE",
    "steps": "INSERT",
    "consumers": "INSERT UPDATE",
    "bindings": "INSERT",
    "activity": "INSERT UPDATE",
    "workers": "INSERT UPDATE DELETE",
    "audit": "INSERT",
}
WRITES: Mapping[Program, Mapping[str, str]] = {
    "worker": _WORKER,
    "spark": {**_WORKER, "runs": "INSERT UPDATE"},
    "relay": {
        "records": "UPDATE",
        "waiting": "UPDATE DELETE",
        "workers": "INSERT UPDATE DELETE",
        "audit": "INSERT",
    },
    "operator": {
        "records": "UPDATE DELETE",
        "waiting": "UPDATE DELETE",
        "steps": "DELETE",
        "consumers": "INSERT UPDATE",
        "activity": "INSERT UPDATE DELETE",
        "workers": "INSERT UPDATE DELETE",
        "runs": "DELETE",
        "audit": "INSERT UPDATE DELETE",
    },
    "reader": {},
}
"""What each writes, by the tables' names in SqlTables. All read all tables."""


def needed(
    programs: Iterable[Program], tables: SqlTables, name: TableName
) -> list[tuple[str, Table]]:
    """The privileges that programs of these kinds need, each with its table."""
    schema = MetaData(schema=tables.records.schema)
    version = Table(name.version_table, schema, Column("version_num", String))
    writes = [WRITES[program] for program in programs]
    return [
        (privilege, table)
        for field, table in (*tables._asdict().items(), ("version", version))
        for privilege in ("SELECT", "INSERT", "UPDATE", "DELETE")
        if privilege == "SELECT" or any(privilege in each.get(field, "") for each in writes)
    ]
