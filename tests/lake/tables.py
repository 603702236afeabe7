"""A table of orders in a folder: Delta, or Iceberg with its catalog in SQLite."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from oncely import lake
from oncely.lake.delta import DeltaKeys
from oncely.lake.iceberg import IcebergKeys

KINDS = ("delta", "iceberg")
KEYS = {"delta": DeltaKeys, "iceberg": IcebergKeys}
"""What commits."""


def rows(*ids: int, day: str = "monday") -> Any:
    """So many orders of a day."""
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "Day": pa.array([day] * len(ids), pa.string())}
    )


class Orders:
    """The table, as a process has it that does nothing with what another one has loaded."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self._path = str(folder / "orders")
        if kind == "iceberg":
            url = f"sqlite:///{folder}/catalog.db"
            self.catalog = SqlCatalog("shop", uri=url, warehouse=f"file://{folder}")

    def create(self) -> "Orders":
        if self.kind == "delta":
            write_deltalake(self._path, rows(), configuration={"delta.checkpointInterval": "5"})
        else:
            self.catalog.create_namespace("shop")
            self.catalog.create_table("shop.orders", schema=rows().schema)
        return self

    def load(self) -> Any:
        """The table, as `oncely.lake` takes it."""
        return self._path if self.kind == "delta" else self.catalog.load_table("shop.orders")

    def write(self, data: Any, key: str, table: Any = None, **options: Any) -> bool:
        write: Any = getattr(lake, f"write_{self.kind}")
        written = write(self.load() if table is None else table, data, key=key, **options)
        assert isinstance(written, bool)
        return written

    def ids(self) -> list[int]:
        """Of all orders, in order."""
        table = self.load()
        read = DeltaTable(table).to_pyarrow_table if self.kind == "delta" else table.scan().to_arrow
        return sorted(read().column("id").to_pylist())

    def maintain(self) -> None:
        """Compact files, remove old ones, and forget old commits."""
        if self.kind == "iceberg":
            table = self.load()
            table.overwrite(table.scan().to_arrow())
            table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
            assert len(self.load().snapshots()) == 1
            return
        table = DeltaTable(self._path)
        table.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
        table.optimize.compact()
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        table.create_checkpoint()
        table.cleanup_metadata()
        assert len([*Path(self._path, "_delta_log").glob("*.json")]) == 1

    def write_at(self, key: str, sent_at: datetime) -> None:
        """A batch of Delta that was committed then."""
        mark = Transaction(key, 1, int(sent_at.timestamp() * 1000))
        properties = CommitProperties(app_transactions=[mark])
        write_deltalake(self._path, rows(1), mode="append", commit_properties=properties)
