"""A batch in a Delta table."""

import pyarrow as pa

from oncely import lake

batch = pa.table({"id": [1, 2]})
assert [lake.write_delta("orders", batch, key="orders/17") for _ in range(2)] == [True, False]
assert lake.probe("orders", "orders/17") == "happened"
