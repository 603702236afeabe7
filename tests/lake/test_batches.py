"""A batch is one commit of a Delta or an Iceberg table, however often, by whomever it is tried."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from tests.lake.tables import KEYS, KINDS, Orders, rows
from tests.logs import events_in
from tests.processes import printed

from oncely import ConfigError, ContentionError, lake

MODES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "append": ({}, [1, 2, 2, 3]),
    "merge": ({"mode": "merge", "on": ["id"]}, [1, 2, 3]),
    "overwrite": ({"mode": "overwrite", "where": "id >= 2"}, [1, 2, 3]),
}
"""Options, and what is there after orders 2 and 3 were written so to a table of 1 and 2."""
NOW = datetime.now(UTC)
# pyiceberg says when an overwrite replaces nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match")


@pytest.fixture(params=KINDS)
def orders(request: pytest.FixtureRequest, tmp_path: Path) -> Orders:
    made = Orders(request.param, tmp_path).create()
    assert made.write(rows(1, 2), "first")
    return made


@pytest.fixture
def before_commits(
    orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[], object]], None]:
    """Has something happen right before the next commit, for which the key was looked for."""
    kind: Any = KEYS[orders.kind]
    commit = kind.commit

    def arrange(event: Callable[[], object]) -> None:
        events = [event]

        def committed(*args: Any) -> None:
            if events:
                events.pop()()
            commit(*args)

        monkeypatch.setattr(kind, "commit", committed)

    return arrange


@pytest.mark.parametrize("mode", MODES)
def test_replay(orders: Orders, mode: str) -> None:
    """The first call commits the batch, and is known to have; another one with its key does not."""
    options, after = MODES[mode]
    table = orders.load()
    assert lake.probe(table, "b") == "not_happened"
    assert orders.write(rows(2, 3), "b", **options)
    assert not orders.write(rows(7), "b")
    assert orders.ids() == after
    assert lake.landed(table, "b")
    assert (lake.probe(table, "b"), lake.probe(table, "c")) == ("happened", "not_happened")


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_write(orders: Orders, mode: str) -> None:
    """A batch without rows has landed, too."""
    options = {**MODES[mode][0], **({"where": "id = 99"} if mode == "overwrite" else {})}
    assert orders.write(rows(), "b", **options)
    assert not orders.write(rows(), "b", **options)
    assert orders.ids() == [1, 2]


@pytest.mark.parametrize("mode", ["append", "merge"])
@pytest.mark.parametrize("ids", [(2, 3), (2,)], ids=["new", "there already"])
def test_stale_writer(
    orders: Orders, mode: str, ids: tuple[int, ...], before_commits: Callable[..., None]
) -> None:
    """Of two writers that have both seen that the key is not there, one commits."""
    options, data = MODES[mode][0], rows(*ids)
    before_commits(lambda: orders.write(data, "b", **options))
    assert not orders.write(data, "b", **options)
    assert orders.ids() == (sorted([1, 2, *ids]) if mode == "append" else sorted({1, 2, *ids}))


@pytest.mark.parametrize("mode", ["append", "merge"])
def test_other_batch_comes_between(
    orders: Orders, mode: str, before_commits: Callable[..., None]
) -> None:
    """A commit that another batch outran is made again, on what that one has left."""
    before_commits(lambda: orders.write(rows(3), "other"))
    assert orders.write(rows(3, 4), "b", **MODES[mode][0])
    assert orders.ids() == ([1, 2, 3, 3, 4] if mode == "append" else [1, 2, 3, 4])


def test_always_outrun(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, before_commits: Callable[..., None]
) -> None:
    """Who never gets through is told so, and that nothing was written."""
    monkeypatch.setattr("oncely.lake.batch._TRIES", 1)
    before_commits(lambda: orders.write(rows(3), "b" if orders.kind == "delta" else "other"))
    with pytest.raises(ContentionError, match="came first, 1 times"):
        orders.write(rows(3), "b")
    assert orders.ids() == [1, 2, 3]


@pytest.mark.parametrize("has_landed", [True, False])
def test_lost_answer(orders: Orders, monkeypatch: pytest.MonkeyPatch, *, has_landed: bool) -> None:
    """A commit whose answer is lost has landed, or has not; the table is asked."""
    kind: Any = KEYS[orders.kind]
    commit = kind.commit

    def lost(*args: Any) -> None:
        if has_landed:
            commit(*args)
        raise ConnectionResetError("lost")

    monkeypatch.setattr(kind, "commit", lost)
    if has_landed:
        assert orders.write(rows(3), "b")
    else:
        with pytest.raises(ConnectionResetError):
            orders.write(rows(3), "b")
    assert lake.landed(orders.load(), "b") is has_landed
    assert orders.ids() == ([1, 2, 3] if has_landed else [1, 2])


def test_repeated_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalog refuses a commit that it has made, since a proxy has sent it twice: it stands,
    and so do its files.
    """
    orders = Orders("iceberg", tmp_path).create()
    commit = orders.catalog.commit_table

    def refused(*args: Any) -> None:
        commit(*args)
        raise CommitFailedException("the branch has changed")

    monkeypatch.setattr(orders.catalog, "commit_table", refused)
    assert orders.write(rows(3), "b")
    assert orders.ids() == [3]


def test_after_maintenance(orders: Orders) -> None:
    """Keys outlive compaction, vacuum, the log's cleanup and snapshots."""
    for number in range(7):
        orders.write(rows(number + 3), f"b{number}")
    orders.maintain()
    assert all(lake.landed(orders.load(), f"b{number}") for number in range(7))
    assert not orders.write(rows(3), "b0")
    assert orders.ids() == [*range(1, 10)]


def test_forgotten_keys_of_iceberg(tmp_path: Path) -> None:
    """The newest keys are kept; of what may be older than the others nobody says that it did not
    happen.
    """
    orders = Orders("iceberg", tmp_path).create()
    for number in range(4):
        orders.write(rows(number), f"b{number}", keep=2)
    table = orders.load()
    assert [lake.landed(table, f"b{number}") for number in range(4)] == [False, False, True, True]
    assert lake.probe(table, "b0") == lake.probe(table, "b0", sent_at=NOW) == "unknown"
    assert lake.probe(table, "new", sent_at=datetime.now(UTC)) == "not_happened"


def test_forgotten_keys_of_delta(tmp_path: Path) -> None:
    """As above, for as long as the table says that it keeps them."""
    orders, path = Orders("delta", tmp_path), str(tmp_path / "orders")
    kept = {"delta.setTransactionRetentionDuration": "interval 2 days"}
    orders.write(rows(0), "b0", configuration=kept, partition_by=["Day"])
    assert DeltaTable(path).metadata().partition_columns == ["Day"]
    old = NOW - timedelta(days=3)
    orders.write_at("old", old)
    assert (lake.landed(path, "old"), lake.landed(path, "b0")) == (False, True)
    assert lake.probe(path, "old") == lake.probe(path, "old", sent_at=old) == "unknown"
    assert lake.probe(path, "new", sent_at=NOW) == "not_happened"
    DeltaTable(path).alter.set_table_properties({next(iter(kept)): "interval 100 days"})
    assert lake.probe(path, "new", sent_at=old) == "not_happened"


def test_unreachable(orders: Orders, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be asked says neither yes nor no."""
    table: Any = tmp_path / "not mounted" / "orders"
    if orders.kind == "iceberg":
        table = orders.load()
        orders.catalog.drop_table("shop.orders")
    assert lake.probe(table, "b") == "unknown"
    assert events_in(caplog) == ["table_unreachable"]
    with pytest.raises((NoSuchTableError, FileNotFoundError)):
        lake.landed(table, "b")


def test_kinds_of_data(orders: Orders) -> None:
    """A reader, a DataFrame and a table are written alike; a DataFrame without its index."""
    frame = pd.DataFrame({"id": [5, 6], "Day": ["tuesday"] * 2}, index=[7, 8])
    assert orders.write(rows(4).to_reader(), "reader")
    assert orders.write(frame[frame["id"] == 6], "frame")
    table: Any = DeltaTable(orders.load()) if orders.kind == "delta" else orders.load()
    assert orders.write(rows(9), "handle", table)
    assert orders.ids() == [1, 2, 4, 6, 9]
    # It shows what was written.
    read = table.to_pyarrow_table if orders.kind == "delta" else table.scan().to_arrow
    assert read().num_rows == 5


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (rows(3), {"mode": "upsert"}, 'write mode="append", or mode="merge", on=["id"], or'),
        (rows(3), {"on": ["id"]}, "mode='append', on=['id'], where=None; write"),
        (rows(3), {"mode": "merge", "on": "id"}, "on='id', where=None; write"),
        (rows(3), {"mode": "overwrite"}, "mode='overwrite', on=(), where=None; write"),
        (rows(3), {"mode": "overwrite", "where": "nope = 1"}, "nope"),
        (rows(3), {"mode": "merge", "on": ["nope"]}, "nope"),
        (rows(3), {"key": ""}, "empty key; give 1 to 255 characters"),
        (rows(3), {"key": "k" * 256}, "too long key"),
        ([{"id": 3}], {}, "data is a list; give a pyarrow.Table"),
        (pa.table({"id": ["x"], "Day": ["x"]}), {}, "does not fit the table: "),
        (pa.table({"id": [3], "zip": [1]}), {}, "zip"),
        (rows(3), {"table": 7}, "7 is not a"),
    ],
)
def test_mistakes(orders: Orders, data: Any, options: dict[str, Any], said: str) -> None:
    """What is wrong, and what to write, in one line; nothing is committed."""
    options = {"key": "b", **options}
    with pytest.raises(ConfigError, match=f"write_{orders.kind}: .*{re.escape(said)}") as caught:
        orders.write(data, **options)
    assert "\n" not in str(caught.value)
    assert orders.ids() == [1, 2]


def test_more_mistakes(tmp_path: Path) -> None:
    """Those of one kind of table alone."""
    with pytest.raises(ConfigError, match=r'no Delta table at .*; mode="append" creates one'):
        lake.write_delta(tmp_path / "orders", rows(1), key="b", mode="merge", on=["id"])
    with pytest.raises(ConfigError, match="probe: None is not a path"):
        lake.probe(None, "b")


@pytest.mark.parametrize(("package", "extra"), [("deltalake", "delta"), ("pyiceberg", "iceberg")])
def test_not_installed(package: str, extra: str) -> None:
    """Where the package is missing, one line says what to type; `landed` is there."""
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "import oncely\nfrom oncely import lake\nlake.landed\n"
        f"try:\n    lake.write_{extra}\n"
        "except oncely.ConfigError as error:\n    print(error)"
    )
    said = f"is not installed; type: pip install 'oncely[{extra}]'\n"
    assert printed(program).endswith(said)
