"""On the servers, no statement of a window reads more of the table than the window."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import Connection, Select, text

from oncely import State
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine
from oncely.stores.store import Look, Query

_ROWS = 200_000
"""PostgreSQL reads a small table from end to end, which is quicker there than an index."""
_COLUMNS = (
    "INSERT INTO processed_messages (message_id, provider, status, attempts, first_processed_at,"
    " last_processed_at, fence, version, exhausted, duplicates)"
)
LOOKS = [
    Look([Query()]),
    Look([Query(consumer="rare")]),
    Look([Query(text="no such text")], after="7"),
    Look([Query(older_than_s=10**9)], begins="7"),
    Look([Query(consumer="rare", state=State.COMPLETED)], begins="7", after="70"),
    Look([Query(state=State.FAILED)], after="7"),
]


def statements_of(store: SqlStore, look: Look) -> list[tuple[str, Any]]:
    """What a window asks its database."""
    asked: list[tuple[str, Any]] = []

    def selected(link: Connection, chosen: Select[Any]) -> Sequence[Sequence[Any]]:
        compiled = chosen.compile(link, compile_kwargs={"render_postcompile": True})
        asked.append((str(compiled), compiled.params))
        return type(store._dialect).selected(store._dialect, link, chosen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._dialect, "selected", selected)
        store.window(look)
    assert asked
    return asked


def plans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A plan of PostgreSQL, and all plans below it."""
    yield plan
    for part in plan.get("Plans", []):
        yield from plans(part)


def read_by_postgresql(connection: Connection, statement: str, values: Any) -> float:
    """How many rows of tables the statement reads."""
    cursor = connection.connection.cursor()
    cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", values)
    [[found]] = cursor.fetchall()
    [explained] = found if isinstance(found, list) else json.loads(found)
    read: float = sum(
        (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
        for plan in plans(explained["Plan"])
        if "Relation Name" in plan
    )
    return read


def read_by_mariadb(connection: Connection, statement: str, values: Any) -> float:
    """How many rows the statement reads."""
    cursor = connection.connection.cursor()
    cursor.execute("FLUSH STATUS")
    cursor.execute(statement, values)
    cursor.fetchall()
    cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
    return sum(int(count) for _, count in cursor.fetchall())


_FILLING = {
    "postgresql": f"{_COLUMNS} SELECT md5(n::text), 'billing', 'sent', 1, now(), now(), 1, 2,"
    f" false, 0 FROM generate_series(1, {_ROWS}) AS n",
    "mysql": f"{_COLUMNS} SELECT md5(seq), 'billing', 'sent', 1, now(6), now(6), 1, 2, false, 0"
    f" FROM seq_1_to_{_ROWS}",
}


@pytest.mark.parametrize(
    ("kind", "is_analysed"), [("postgresql", False), ("postgresql", True), ("mysql", False)]
)
def test_windows(kind: str, is_analysed: bool, request: pytest.FixtureRequest) -> None:
    """However few records fit, also where the server has no statistics of the table."""
    read = {"postgresql": read_by_postgresql, "mysql": read_by_mariadb}[kind]
    engine = server_engine(request.getfixturevalue(f"{kind}_ledger_url"))
    with closing(SqlStore(engine)) as store, engine.connect() as connection:
        connection.execute(text(_FILLING[kind]))
        if is_analysed:
            connection.execute(text("ANALYZE processed_messages"))
        for look in LOOKS:
            for statement, values in statements_of(store, look):
                assert read(connection, statement, values) <= look.size + 2, look
