"""The sink on every store: connections from Spark's Python workers."""

import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from pyspark.errors import PySparkException
from sqlalchemy import make_url
from tests.conditions import wait_until
from tests.conformance.conftest import SHARED, url_of
from tests.turns import in_turn

from oncely import State, open_ledger
from oncely.core.waiting import retries_of
from oncely.locations import LedgerAddress
from oncely.spark.failures import as_own
from oncely.spark.ledgers import migrated_ledger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Effects, Write

Frame = Callable[..., "DataFrame"]


@pytest.mark.parametrize("kind", in_turn("store of the sink", SHARED))
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
    ("refused", "said"),
    [
        ("DELETE ON waiting_messages", "nothing is deleted here"),
        ("UPDATE ON processed_messages WHEN NEW.status = 'sent'", "nothing is completed here"),
    ],
)
def test_what_a_store_refuses_for_good_ends_the_write(
    refused: str, said: str, ledger_url: str, frame: Frame, write: "Write", effects: "Effects"
) -> None:
    """At once: another attempt of the task would wait for the first one's claims, and then call the
    handlers again.
    """
    file = make_url(ledger_url).database or ""
    with closing(sqlite3.connect(file)) as connection:
        never = f"CREATE TRIGGER never BEFORE {refused} BEGIN SELECT RAISE(ABORT, '{said}'); END"
        connection.execute(never)

    def write_twice() -> None:
        # The first write leaves retries that wait, or fails.
        for ids in (["a", "b"], ["c", "d"]):
            write(frame(*ids), "fail_first", lease="3s", backoff="1ms")
            wait_until(lambda: is_due(ledger_url), limit_s=60)

    with pytest.raises(PySparkException) as raised:
        write_twice()
    own = str(as_own(raised.value))
    assert own.startswith("sqlite")
    assert own.endswith(said)
    assert set(effects.per_message().values()) <= {1}


def is_due(url: str) -> bool:
    with closing(open_ledger(url)) as ledger:
        return ledger.mailbox.free_in_s(retries_of("tests")) in (0, None)


@pytest.mark.in_turn("long on Spark")
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
    """A Python worker has two at most, and beside Spark's workers only the driver has any."""
    with psycopg.connect(postgresql_url) as connection:
        connection.execute("CREATE TABLE payments (id text, body text, source text)")
        connection.execute("CREATE TABLE effects (name text)")
    with counting(postgresql_url) as (counts, seen):
        for run in range(3):
            messages = frame(*(f"{run}-{number}" for number in range(400)), partitions=8)
            assert write(messages, ledger=postgresql_url, mode=mode, **own).handled == 400
    assert 1 <= max(max(count.values(), default=0) for count in counts) <= 2
    assert max(len({*count} - seen) for count in counts) <= 1


def test_ledgers_of_many_places_are_closed(postgresql_url: str) -> None:
    """A process keeps those open that were asked for last; one that was closed opens again."""
    places = [LedgerAddress(postgresql_url, f"messages_{n}") for n in range(12)]
    first = migrated_ledger(places[0])
    for place in places:
        migrated_ledger(place).now()
    # In a transaction, the server would answer the same each time.
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        asked = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        # A server takes its time to end what was hung up.
        wait_until(lambda: connection.execute(asked).fetchone() == (8,))
    assert first.now() > 0
    first.close()


@contextmanager
def counting(url: str) -> Iterator[tuple[list[Counter[int]], set[int]]]:
    """Connections of other processes, again and again; and the Python workers that were there."""
    counts: list[Counter[int]] = []
    seen: set[int] = set()
    over = threading.Event()

    def count() -> None:
        asked = (
            "SELECT client_port FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with psycopg.connect(url, autocommit=True) as connection:
            while not over.wait(0.01):
                seen.update(workers())
                ports = {port for [port] in connection.execute(asked)}
                counts.append(Counter(owners_of(ports)))

    counter = threading.Thread(target=count)
    counter.start()
    yield counts, seen
    over.set()
    counter.join()


def workers() -> set[int]:
    """The Python workers of this process's Spark, and the processes of their handlers."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile.
        with suppress(OSError):
            if _is_of_workers(folder) and os.getpid() in _parents(int(folder.name)):
                found.add(int(folder.name))
    return found


def _is_of_workers(process: Path) -> bool:
    return b"pyspark.worker" in (process / "cmdline").read_bytes()


def _parents(pid: int) -> Iterator[int]:
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        yield pid


def owners_of(ports: set[int]) -> list[int]:
    """The processes that have connections from these ports, each as often as it has one."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if int(row[1].rpartition(":")[2], 16) in ports}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end meanwhile, or close one.
        with suppress(OSError):
            for file in os.scandir(folder / "fd"):
                with suppress(OSError):
                    if Path(file).readlink().name in sockets:
                        found.append(int(folder.name))
    return found
