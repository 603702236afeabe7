"""A batch is one commit of a Delta or an Iceberg table, however often, by whomever it is tried."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyiceberg.exceptions import CommitFailedException
from tests.lake.tables import KEYS, Orders, rows
from tests.logs import events_in
from tests.processes import printed

from oncely import ConfigError, lake
from oncely.lake.batch import Outrun

MERGE: dict[str, Any] = {"mode": "merge", "on": ["id"]}


@pytest.fixture(params=KEYS)
def orders(request: pytest.FixtureRequest, tmp_path: Path) -> Orders:
    made = Orders(request.param, tmp_path).create()
    assert made.write(rows(1, 2), "first")
    return made


def around_commit(orders: Orders, instead: Callable[[Callable[[], Any]], object]) -> None:
    """Call a function in place of the next commit, for which the key was looked for: with it."""
    kind = KEYS[orders.kind]
    commit = kind.commit

    def once(*args: Any) -> None:
        kind.commit = commit
        instead(lambda: commit(*args))

    kind.commit = once


@pytest.mark.parametrize("ids", [(), (2, 3)], ids=["nothing", "rows"])
@pytest.mark.parametrize("options", [{}, MERGE, {"mode": "overwrite", "where": "id >= 2"}])
def test_replay(orders: Orders, options: dict[str, Any], ids: tuple[int, ...]) -> None:
    """The first call commits the batch, and is known to have; another one with its key does not."""
    table = orders.load()
    assert orders.write(rows(*ids), "b", **options) is True
    assert orders.write(rows(7), "b") is False
    kept = [1] if options.get("where") else [1, 2]
    assert orders.ids() == sorted({*kept, *ids} if options else [*kept, *ids])
    assert (lake.landed(table, "b"), lake.probe(table, "b")) == (True, "happened")
    assert (lake.landed(table, "c"), lake.probe(table, "c")) == (False, "not_happened")


@pytest.mark.parametrize("options", [{}, MERGE], ids=["append", "merge"])
@pytest.mark.parametrize("ids", [[2, 3], [2]], ids=["new", "there already"])
def test_stale_writer(orders: Orders, options: dict[str, Any], ids: list[int]) -> None:
    """Two writers have both seen that the key is not there: one commits; with two keys, both do."""

    def outrun(commit: Callable[[], Any]) -> None:
        assert orders.write(rows(*ids), "b", **options)
        commit()

    around_commit(orders, outrun)
    assert not orders.write(rows(*ids), "b", **options)
    assert orders.ids() == sorted({1, 2, *ids} if options else [1, 2, *ids])
    around_commit(orders, lambda commit: (orders.write(rows(4), "other"), commit()))
    assert orders.write(rows(4), "c", **options)
    assert orders.ids().count(4) == (1 if options else 2)


@pytest.mark.parametrize(("error", "lands"), [(OSError, 1), (OSError, 0), (Outrun, 1)])
def test_lost_answer(orders: Orders, error: type[Exception], lands: int) -> None:
    """A commit whose answer is lost has landed, or has not; the table is asked."""

    def lost(commit: Callable[[], Any]) -> None:
        if lands:
            commit()
        raise error

    around_commit(orders, lost)
    with nullcontext() if lands else pytest.raises(error):
        assert orders.write(rows(3), "b")
    assert orders.ids() == ([1, 2, 3] if lands else [1, 2])


@pytest.mark.parametrize("options", [{}, MERGE, {"mode": "overwrite", "where": "id >= 2"}])
@pytest.mark.parametrize("keep", [None, 2, 1])
def test_repeated_request(tmp_path: Path, options: dict[str, Any], keep: int | None) -> None:
    """A catalog refuses a commit that it has made, since a proxy has sent it twice: it stands, and
    can be read, also if another writer, which keeps so many keys, has committed since.
    """
    orders = Orders("iceberg", tmp_path).create()
    assert orders.write(rows(2), "first")
    table, catalog = orders.load(), Orders("iceberg", tmp_path).catalog
    table.catalog = catalog
    commit = catalog.commit_table

    def refused(*args: Any) -> None:
        commit(*args)
        if keep:
            orders.write(rows(9), "other", keep=keep)
        raise CommitFailedException("the branch has changed")

    catalog.commit_table = refused  # type: ignore[assignment]
    assert orders.write(rows(3), "b", table, **options)
    kept = [3] if options.get("where") else [2, 3]
    assert orders.ids() == [*kept, *([9] if keep else [])]


def test_after_maintenance(orders: Orders) -> None:
    """Keys outlive compaction, vacuum, the log's cleanup and snapshots."""
    for number in range(3, 9):
        orders.write(rows(number), f"b{number}")
    orders.maintain()
    assert all(lake.landed(orders.load(), f"b{number}") for number in range(3, 9))
    assert orders.ids() == [*range(1, 9)]


def test_forgotten_keys_of_iceberg(tmp_path: Path) -> None:
    """The newest keys are kept; what may be older than they are is unknown."""
    orders, now = Orders("iceberg", tmp_path).create(), datetime.now(UTC)
    for number in range(4):
        orders.write(rows(number), f"b{number}", keep=2)
    table = orders.load()
    assert [lake.landed(table, f"b{number}") for number in range(4)] == [False, False, True, True]
    assert lake.probe(table, "b0") == lake.probe(table, "b0", sent_at=now) == "unknown"
    assert lake.probe(table, "new", sent_at=datetime.now(UTC)) == "not_happened"


def test_forgotten_keys_of_delta(tmp_path: Path) -> None:
    """As above, for as long as the table says that it keeps them."""
    orders, now = Orders("delta", tmp_path), datetime.now(UTC)
    old = now - timedelta(days=3)
    kept = {"delta.setTransactionRetentionDuration": "interval 2 days"}
    with pytest.raises(ConfigError, match=r'no Delta table at .*; mode="append" creates one'):
        orders.write(rows(0), "b0", **MERGE)
    orders.write(rows(0), "b0", configuration=kept, partition_by=["Day"])
    mark = CommitProperties(app_transactions=[Transaction("old", 1, int(old.timestamp() * 1000))])
    write_deltalake(orders.path, rows(1), mode="append", commit_properties=mark)
    assert (lake.landed(orders.path, "old"), lake.landed(orders.path, "b0")) == (False, True)
    assert {lake.probe(orders.path, "old", sent_at=at) for at in (None, old)} == {"unknown"}
    assert lake.probe(orders.path, "new", sent_at=now) == "not_happened"


def test_unreachable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be asked says neither yes nor no."""
    assert lake.probe(tmp_path / "not mounted" / "orders", "b") == "unknown"
    assert events_in(caplog) == ["table_unreachable"]


def test_created_by_many(tmp_path: Path) -> None:
    """Of writers that create a table of Delta, one commits each batch."""
    orders = Orders("delta", tmp_path / "new")
    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(lambda key: orders.write(rows(1), key), ["a", "b"] * 3)) == 2


def test_kinds_of_data(orders: Orders) -> None:
    """A reader, and a DataFrame without its index; into a table that was loaded before."""
    frame = pd.DataFrame({"id": [5, 6], "Day": ["tuesday"] * 2})
    assert orders.write(frame[frame["id"] == 6], "frame")
    table = DeltaTable(orders.path) if orders.kind == "delta" else None
    assert orders.write(rows(4).to_reader(), "reader", table)
    assert orders.ids() == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (rows(3), {"mode": "upsert"}, 'write mode="append", or mode="merge", on=["id"], or'),
        (rows(3), {"mode": "overwrite", "where": "nope = 1"}, "nope"),
        (rows(3), {"key": ""}, "empty key; give 1 to 255 characters"),
        ([{"id": 3}], {}, "data is a list; give a pyarrow.Table"),
        (pa.table({"id": ["x"], "Day": ["x"]}), {}, "does not fit the table: "),
        (rows(3), {"table": 7}, "7 is not a"),
    ],
)
def test_mistakes(orders: Orders, data: Any, options: dict[str, Any], said: str) -> None:
    """What is wrong, and what to write, in one line; nothing is committed."""
    with pytest.raises(ConfigError, match=f"write_{orders.kind}: .*{re.escape(said)}") as caught:
        orders.write(data, **{"key": "b", **options})
    assert "\n" not in str(caught.value)
    assert orders.ids() == [1, 2]


@pytest.mark.parametrize(("package", "extra"), [("deltalake", "delta"), ("pyiceberg", "iceberg")])
def test_not_installed(package: str, extra: str) -> None:
    """Where the package is missing, one line says what to type."""
    program = f"import sys; sys.modules['{package}'] = None; import oncely.lake as lake\ntry: "
    program += f"lake.write_{extra}\nexcept lake.batch.ConfigError as error: print(error)"
    said = f"is not installed; type: pip install 'oncely[{extra}]'\n"
    assert printed(program).endswith(said)
