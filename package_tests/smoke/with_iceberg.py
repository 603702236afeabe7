"""A batch in an Iceberg table."""

from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog.memory import InMemoryCatalog

from oncely import lake

batch = pa.table({"id": [1, 2]})
catalog = InMemoryCatalog("shop", warehouse=f"file://{Path.cwd()}")
catalog.create_namespace("shop")
orders = catalog.create_table("shop.orders", schema=batch.schema)
assert [lake.write_iceberg(orders, batch, key="orders/17") for _ in range(2)] == [True, False]
assert lake.probe(orders, "orders/17") == "happened"
