"""Tables of Delta Lake: a batch's key is an application's transaction in its commit, the token its
version. Checkpoints keep it, so compaction, vacuum and the log's cleanup leave it; and of two
commits with the same one, both on a state without it, Delta refuses the second.
"""

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from oncely.core.errors import ConfigError
from oncely.lake.batch import Mode, Outrun, checked_rows, write_once
from oncely.stores.open_store import extra_installed

with extra_installed("delta", "oncely.lake"):
    import pyarrow as pa
    from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
    from deltalake.exceptions import CommitFailedError, SchemaMismatchError, TableNotFoundError


def write_delta(
    table: str | Path | DeltaTable,
    data: Any,
    *,
    key: str,
    mode: Mode = "append",
    on: Sequence[str] = (),
    where: str | None = None,
    storage_options: dict[str, str] | None = None,
    **options: Any,
) -> bool:
    """Write a batch in one commit that carries `key`: True if this call did, False if a commit with
    this key is in the table.

    `data` is a pyarrow Table or RecordBatchReader, or a DataFrame. "append" creates a missing
    table, "merge" updates rows with the same columns `on` and inserts others, "overwrite" replaces
    what the SQL `where` selects. `options` are those of `write_deltalake`, of `DeltaTable.merge`
    for a merge. Raises ConfigError, ContentionError, and what deltalake raises.
    """
    rows = checked_rows("write_delta", data, key, mode, on, where)
    keys = DeltaKeys(table, "write_delta", storage_options, creates=True)
    commit = partial(keys.commit, rows, key, mode, on, where, options)
    return write_once("write_delta", keys, key, commit)


def columns_of(path: str, of_new: pa.Schema | None) -> pa.Schema:
    """The columns of a table. If it does not exist, it is created with the columns `of_new`."""
    if of_new is not None and not DeltaTable.is_deltatable(path):
        write_deltalake(path, of_new.empty_table(), mode="ignore")
    return pa.schema(DeltaTable(path).schema().to_arrow())


class DeltaKeys:
    """The keys of one Delta table, which need not exist."""

    def __init__(self, table: Any, call: str, storage: Any = None, *, creates: bool = False):
        if not isinstance(table, str | Path | DeltaTable):
            raise ConfigError(f"{call}: {table!r} is not a path, a URL or a DeltaTable")
        self.name = table.table_uri if isinstance(table, DeltaTable) else str(table)
        self._table = table if isinstance(table, DeltaTable) else None
        self._storage, self._creates = storage, creates

    def find(self, key: str) -> tuple[int | None, datetime | None]:
        try:
            if self._table is None:
                self._table = DeltaTable(self.name, storage_options=self._storage)
            else:
                self._table.update_incremental()
        except TableNotFoundError:
            if not self._creates and "://" not in self.name:
                Path(self.name).parent.stat()  # What is not mounted does not say that none landed.
            return None, None
        properties = self._table.metadata().configuration
        kept = properties.get("delta.setTransactionRetentionDuration", "")
        found = re.fullmatch("interval ([0-9]+) (week|day|hour|minute|second)s?", kept.lower())
        until = found and datetime.now(UTC) - timedelta(**{f"{found[2]}s": int(found[1])})
        return self._table.transaction_version(key), until

    def commit(
        self, rows: Any, key: str, mode: Mode, on: Sequence[str], where: Any, given: Any, token: int
    ) -> None:
        if self._table is None and mode != "append":
            raise ConfigError(f'no Delta table at {self.name}; mode="append" creates one')
        # Without a time, Delta would keep it beyond the table's retention.
        mark = Transaction(key, token, last_updated=time.time_ns() // 1_000_000)
        properties = CommitProperties({"oncely.key": key}, app_transactions=[mark])
        options = {**given, "commit_properties": properties}
        try:
            if self._table is None:
                # Without rows: of writers that create a table, deltalake may let several succeed.
                options = {**given, "storage_options": self._storage}
                write_deltalake(self.name, rows.slice(0, 0), mode="ignore", **options)
                raise Outrun
            # A merge of no rows would commit nothing, and the key is to be known.
            if mode == "merge" and rows.num_rows:
                names = ['"' + name.replace('"', '""') + '"' for name in on]
                same = " AND ".join(f"target.{name} = source.{name}" for name in names)
                merger = self._table.merge(rows, same, "source", "target", **options)
                merger.when_matched_update_all().when_not_matched_insert_all().execute()
            elif mode == "overwrite":
                write_deltalake(self._table, rows, mode=mode, predicate=where, **options)
            else:
                write_deltalake(self._table, rows, mode="append", **options)
        except CommitFailedError as error:
            raise Outrun from error
        except Exception as error:
            # What cannot be cast has no class of its own.
            if type(error) in (SchemaMismatchError, Exception) or "Schema error" in str(error):
                raise ConfigError(f"the batch does not fit the table: {error}") from error
            raise
