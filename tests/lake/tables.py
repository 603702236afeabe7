"""A table of orders in a folder: Delta, or Iceberg with its catalog in SQLite."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from oncely import lake
from oncely.lake.delta import DeltaKeys
from oncely.lake.iceberg import IcebergKeys

KEYS: dict[str, Any] = {"delta": DeltaKeys, "iceberg": IcebergKeys}


def rows(*ids: int) -> Any:
    """So many orders."""
    return pa.table(
        {"id": pa.array(ids, pa.int64()), "Day": pa.array(["monday" for _ in ids], "string")}
    )


class Orders:
    """The table, as a process has it that does nothing with what another one has loaded."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = str(folder / "orders")
        self.location = f"delta:{self.path}" if kind == "delta" else "iceberg:shop.shop.orders"
        """The table as mode `rows` of Spark names it."""
        if kind == "iceberg":
            url = f"sqlite:///{folder}/catalog.db"
            self.catalog = SqlCatalog("shop", uri=url, warehouse=f"file://{folder}")

    def create(self, schema: Any = rows().schema) -> "Orders":
        if self.kind == "delta":
            often = {"delta.checkpointInterval": "5"}
            write_deltalake(self.path, schema.empty_table(), configuration=often)
        else:
            self.catalog.create_namespace("shop")
            self.catalog.create_table("shop.orders", schema=schema)
        return self

    def load(self) -> Any:
        return self.path if self.kind == "delta" else self.catalog.load_table("shop.orders")

    def write(self, data: Any, key: str, table: Any = None, **options: Any) -> Any:
        write = lake.write_delta if self.kind == "delta" else lake.write_iceberg
        return write(self.load() if table is None else table, data, key=key, **options)

    def read(self) -> Any:
        table = self.load()
        is_delta = self.kind == "delta"
        return DeltaTable(table).to_pyarrow_table() if is_delta else table.scan().to_arrow()

    def ids(self) -> list[Any]:
        return sorted(self.read().column("id").to_pylist())

    def maintain(self) -> None:
        """Compact files, remove old ones, and forget old commits."""
        if self.kind == "iceberg":
            (table := self.load()).overwrite(table.scan().to_arrow())
            table.maintenance.expire_snapshots().older_than(datetime.now(UTC)).commit()
            return
        delta = DeltaTable(self.path)
        delta.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
        delta.optimize.compact()
        delta.vacuum(0, dry_run=False, enforce_retention_duration=False)
        delta.create_checkpoint()
        delta.cleanup_metadata()
