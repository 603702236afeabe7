"""SQLite finds the rows of a batch by their keys."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import cast

from oncely.core.record import Key
from oncely.ledger.ledger import Ledger
from oncely.stores.sql.engines import sqlite_engine
from oncely.stores.sql.sql_store import SqlStore
from oncely.stores.sql.sqlite import Sqlite


def test_a_batch_of_writes_reads_no_other_rows_whatever_the_statistics_say(tmp_path: Path) -> None:
    """With statistics from when the table was small, a batch still finds its rows by their keys."""
    store = SqlStore(sqlite_engine(tmp_path / "ledger.db"))
    store.migrate()
    ledger = Ledger(store)
    ledger.claim_many([Key("billing", f"m{n}") for n in range(3)])
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.execute("ANALYZE")
        connection.commit()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        statement = cast(Sqlite, store._dialect)._build_update(
            ("message_id",), ("status", "lease_s")
        )
        names = re.findall(r":(\w+)", statement)
        values = {**dict.fromkeys(names, 1), "rows": '["m0"]'}
        plan = connection.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
    assert not [row for row in plan if row[3].startswith("SCAN t")]
