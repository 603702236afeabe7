"""Targets of batch handlers that are killed: in each, what a batch has written stands once.

`ONCELY_TEST_TARGETS` names the folder with the targets, and with a log of what handlers were given.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from deltalake import DeltaTable

from oncely import lake
from oncely._util.crash_points import reached

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "ONCELY_TEST_TARGETS"
DATABASE = "ONCELY_TEST_DATABASE"
CALLS = "calls"


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def noted(batch_key: str, ids: list[str]) -> None:
    digest = hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()
    with (_folder() / CALLS).open("a") as file:
        file.write(json.dumps([batch_key, len(ids), digest]) + "\n")


def to_parquet(messages: "DataFrame", batch_key: str) -> None:
    """A folder for each batch: written again, it is the same."""
    noted(batch_key, [row.id for row in messages.select("id").collect()])
    messages.write.mode("overwrite").parquet(str(_folder() / "parquet" / batch_key))
    reached("in_batch_handler")


def to_table(messages: "DataFrame", batch_key: str) -> None:
    """Rows and the batch key in one transaction, as JDBC would write them."""
    rows = [(row.id, row.body) for row in messages.collect()]
    noted(batch_key, [id_ for id_, _ in rows])
    with psycopg.connect(os.environ[DATABASE]) as connection:
        connection.execute("INSERT INTO batches VALUES (%s)", [batch_key])
        connection.cursor().executemany("INSERT INTO rows VALUES (%s, %s)", rows)
    reached("in_batch_handler")


def asked_table(batch_key: str) -> str:
    with psycopg.connect(os.environ[DATABASE]) as connection:
        found = connection.execute("SELECT 1 FROM batches WHERE key = %s", [batch_key]).fetchone()
    return "not_happened" if found is None else "happened"


def to_delta(messages: "DataFrame", batch_key: str) -> None:
    """One commit of a Delta table, which carries the batch key."""
    rows = messages.toArrow()
    noted(batch_key, rows.column("id").to_pylist())
    lake.write_delta(_folder() / "delta", rows, key=batch_key)
    reached("in_batch_handler")


def asked_delta(batch_key: str) -> str:
    return lake.probe(_folder() / "delta", batch_key)


def ids_in_parquet() -> list[str]:
    import pyarrow.parquet as pq

    table = pq.read_table(_folder() / "parquet", columns=["id"])
    return list(table.column("id").to_pylist())


def ids_in_table() -> list[str]:
    with psycopg.connect(os.environ[DATABASE]) as connection:
        return [id_ for (id_,) in connection.execute("SELECT id FROM rows")]


def ids_in_delta() -> list[str]:
    table = DeltaTable(str(_folder() / "delta")).to_pyarrow_table(columns=["id"])
    return list(table.column("id").to_pylist())


POLICIES: Mapping[str, Mapping[str, str]] = {
    "parquet": {"handler_batch": "batch_targets:to_parquet", "on_in_doubt": "retry"},
    "table": {
        "handler_batch": "batch_targets:to_table",
        "on_in_doubt": "batch_targets:asked_table",
    },
    "delta": {
        "handler_batch": "batch_targets:to_delta",
        "on_in_doubt": "batch_targets:asked_delta",
    },
    "held": {"handler_batch": "batch_targets:to_parquet", "on_in_doubt": "hold"},
}
"""The options of each target; `held` is Parquet as well, with another policy."""
IDS_IN: Mapping[str, Callable[[], list[str]]] = {
    "parquet": ids_in_parquet,
    "table": ids_in_table,
    "delta": ids_in_delta,
    "held": ids_in_parquet,
}
