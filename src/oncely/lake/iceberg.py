"""Tables of Apache Iceberg: a property of the table, which each commit sets, has the batches' keys,
and stays when snapshots expire and files are compacted. All keys are in one, because pyiceberg
copies the properties many times in a commit.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from oncely.core.errors import ConfigError, describe
from oncely.lake.batch import Mode, Outrun, checked_rows, write_once
from oncely.stores.open_store import extra_installed

with extra_installed("iceberg", "oncely.lake"):
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import (
        CommitFailedException,
        NoSuchNamespaceError,
        NoSuchTableError,
    )
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.table import Table

_KEYS = "oncely.batches"
"""A JSON object of the keys, the oldest first: each with the time of its commit, and the token."""
_FORGOTTEN_UNTIL = "oncely.forgotten-until"


def write_iceberg(
    table: Table,
    data: Any,
    *,
    key: str,
    mode: Mode = "append",
    on: Sequence[str] = (),
    where: str | BooleanExpression | None = None,
    keep: int = 1_000,
) -> bool:
    """As `write_delta`, for a table of pyiceberg, which is refreshed, and which remembers the
    newest `keep` keys. `where` is a filter of pyiceberg, and the table has to exist.
    """
    rows = checked_rows("write_iceberg", data, key, mode, on, where)
    keys = IcebergKeys(table, "write_iceberg")
    commit = partial(keys.commit, rows, key, mode, on, where, keep)
    return write_once("write_iceberg", keys, key, commit)


def named_table(name: str) -> Table:
    """The table "CATALOG.NAMESPACE.TABLE", of a catalog in pyiceberg's own configuration.

    Raises ConfigError.
    """
    catalog, _, table = name.partition(".")
    try:
        return load_catalog(catalog).load_table(table)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        told = f"the catalog {catalog!r} has no table {table!r}; create it first"
        raise ConfigError(f"table: {told}") from error
    except Exception as error:
        told = f"the catalog {catalog!r} cannot be used: {describe(error)}; look at"
        variables = f"PYICEBERG_CATALOG__{catalog.upper()}__URI and the like"
        raise ConfigError(f"table: {told} {variables}") from error


class _CommitsOnce(Table):
    """When another commit came first, pyiceberg repeats one on newer metadata, in which nobody has
    looked for its key. Of this table, it does not.
    """

    snapshot_id: int | None
    """The snapshot of the commit."""

    def refresh(self) -> Table:
        """What pyiceberg does first; it finds out where only the answer of the commit was lost."""
        super().refresh()
        # Where it has landed, pyiceberg must not hear that it has not: it would delete its files.
        if self.snapshot_id not in {each.snapshot_id for each in self.snapshots()}:
            raise CommitFailedException("another commit came first")
        return self


class IcebergKeys:
    """The keys of one Iceberg table."""

    def __init__(self, table: Any, call: str) -> None:
        if not isinstance(table, Table):
            raise ConfigError(f'{call}: {table!r} is not a table; give catalog.load_table("a.b")')
        self.name = ".".join(table.name())
        self._table = table
        self._keys: dict[str, tuple[str, int]] = {}

    def find(self, key: str) -> tuple[int | None, datetime | None]:
        properties = self._table.refresh().properties
        self._keys = json.loads(properties.get(_KEYS, "{}"))
        until = properties.get(_FORGOTTEN_UNTIL)
        return self._keys.get(key, ("", None))[1], datetime.fromisoformat(until) if until else None

    def commit(
        self, rows: Any, key: str, mode: Mode, on: Sequence[str], where: Any, keep: int, token: int
    ) -> None:
        given = self._table
        state = (given.name(), given.metadata, given.metadata_location)
        table = _CommitsOnce(*state, given.io, given.catalog, given.config)
        transaction = table.transaction()
        told: Any = {"snapshot_properties": {"oncely.key": key}}
        try:
            if mode == "overwrite":
                transaction.overwrite(rows, where, **told)
            elif mode == "append":
                transaction.append(rows, **told)
            else:
                transaction.upsert(rows, [*on], **told)
                # Only with a snapshot, though nothing may change, does a catalog compare the state.
                if transaction.table_metadata.current_snapshot() == given.current_snapshot():
                    transaction.append(rows.slice(0, 0), **told)
        except (ValueError, LookupError, NotImplementedError) as error:
            raise ConfigError(f"the batch does not fit the table: {error}") from error
        table.snapshot_id = transaction.table_metadata.current_snapshot_id
        # Last: each step applies those before it again.
        transaction.set_properties(self._properties_with(key, token, keep))
        try:
            transaction.commit_transaction()
        except CommitFailedException as error:
            raise Outrun from error
        given.metadata, given.metadata_location = table.metadata, table.metadata_location

    def _properties_with(self, key: str, token: int, keep: int) -> dict[str, str]:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        keys = [*self._keys.items(), (key, (now, token))]
        properties = {_KEYS: json.dumps(dict(keys[-keep:]))}
        if forgotten := [at for _, (at, _) in keys[:-keep]]:
            until = self._table.properties.get(_FORGOTTEN_UNTIL, "")
            properties[_FORGOTTEN_UNTIL] = max(until, *forgotten)
        return properties
