"""The sink on every store: connections from Spark's Python workers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from tests.conformance.conftest import SHARED, url_of

from oncely import State, open_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.servers import Postgresql
    from tests.spark.conftest import Effects, Write

Frame = Callable[..., "DataFrame"]

_CORES = 2
"""Tasks that the session of the tests runs at a time."""


@pytest.mark.parametrize("kind", SHARED)
def test_every_store(
    kind: str,
    request: pytest.FixtureRequest,
    spark: "SparkSession",
    frame: Frame,
    write: "Write",
    effects: "Effects",
    tmp_path: Path,
) -> None:
    """Executors claim in every store, copies have one effect, and Spark reads what they stored."""
    url = url_of(kind, request, tmp_path)
    ids = [f"m{number}" for number in range(400)]
    first = write(frame(*ids, *ids[:50], partitions=3), ledger=url, since="0")
    again = write(frame(*ids[:50], "new"), ledger=url)
    assert (first.handled, first.duplicates_input) == (400, 50)
    assert (again.handled, again.duplicates_ledger) == (1, 50)
    assert set(effects.per_message().values()) == {1}
    with closing(open_ledger(url)) as ledger:
        assert ledger.counts() == {("tests", State.COMPLETED): 401}
    read = spark.read.format("oncely").options(ledger=url, consumer="tests").load()
    assert {row.message_id for row in read.collect()} == {*ids, "new"}


@pytest.mark.parametrize(
    ("mode", "own"),
    [
        ("leased", {"handler": "handlers:slowly"}),
        ("transactional", {"handler": "handlers:book"}),
        ("rows", {"handler": "", "table": "payments", "chunk": "10"}),
    ],
)
def test_connections_are_bounded_by_running_tasks(
    mode: str, own: dict[str, str], frame: Frame, write: "Write", postgresql_url: str
) -> None:
    """However many tasks and jobs there are: a connection of its own for each that runs, and one
    for its heartbeat or its ledger, at most; in mode `rows` one for the driver, too. A task may
    begin before Spark has the Python worker back of one that has ended: that is one worker more.
    """
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE payments (id text, body text, source text)")
        connection.execute("CREATE TABLE effects (name text)")
    with counting(postgresql_url) as counts:
        for run in range(3):
            messages = frame(*(f"{run}-{number}" for number in range(400)), partitions=8)
            assert write(messages, ledger=postgresql_url, mode=mode, **own).handled == 400
    assert 1 <= max(counts) <= 2 * (_CORES + 1) + (mode == "rows")


def test_workers_outlive_their_server(
    frame: Frame, write: "Write", effects: "Effects", private_postgresql: "Postgresql"
) -> None:
    """Workers whose connections have died with the server go on when it is back."""
    url = private_postgresql.url
    ids = [f"m{number}" for number in range(100)]
    assert write(frame(*ids, partitions=2), ledger=url).handled == 100
    before = {line["pid"] for line in effects.lines()}
    private_postgresql.kill()
    private_postgresql.start()
    counts = write(frame(*ids, *(f"n{id_}" for id_ in ids), partitions=2), ledger=url)
    assert (counts.handled, counts.duplicates_ledger) == (100, 100)
    assert {line["pid"] for line in effects.lines()[100:]} <= before


@contextmanager
def counting(url: str) -> Iterator[list[int]]:
    """Meanwhile, how many connections others have to a database, again and again."""
    counts: list[int] = []
    over = threading.Event()

    def count() -> None:
        asked = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with psycopg.connect(url, autocommit=True) as connection:
            while not over.wait(0.01):
                [[number]] = connection.execute(asked).fetchall()
                counts.append(number)

    counter = threading.Thread(target=count)
    counter.start()
    yield counts
    over.set()
    counter.join()
