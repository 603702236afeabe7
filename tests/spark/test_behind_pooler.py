"""Every mode behind PgBouncer, which lends a session for a transaction: tasks share a few."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text
from tests.servers import PgBouncer
from tests.spark.payments import Place, batches_of
from tests.spark.tasks import at_once, book, task_of
from tests.spark.tasks import batches_of as batches_of_ids

from oncely import Message, State
from oncely.stores.open_store import open_sessions

TASKS = 2 * PgBouncer.SESSIONS
MESSAGES = 400


@pytest.fixture
def place(postgresql_url: str, pooled_url: str, tmp_path: Path) -> Iterator[Place]:
    """A ledger behind the pooler, on a server that stands in New York."""
    direct = Place(postgresql_url, tmp_path)
    database = make_url(postgresql_url).database
    direct.execute(f"ALTER DATABASE {database} SET timezone TO 'America/New_York'")
    direct.execute("DROP TABLE payments, balances")
    direct.close()
    place = Place(pooled_url, tmp_path)
    place.execute("CREATE TABLE seen (account VARCHAR(20) PRIMARY KEY, at TIMESTAMPTZ, n INTEGER)")
    place.execute("CREATE TABLE effects (name VARCHAR(255))")
    with closing(place):
        yield place


def run_all(tasks: Sequence[Any], batches: Callable[[int], Any]) -> int:
    """Let tasks run at once, each over batches of its own; how many messages were handled."""
    at_once(tasks, *map(batches, range(len(tasks))))
    counts = [task.counts for task in tasks]
    assert all(each.received == each.settled for each in counts)
    return sum(each.handled for each in counts)


def ids_of(task: int) -> list[str]:
    """The same for each task, in another order."""
    first = task * MESSAGES // TASKS
    return [f"m{(first + n) % MESSAGES:04}" for n in range(MESSAGES)]


def test_rows(place: Place) -> None:
    """Also through a heap of the session's own, and times without a zone are in UTC."""
    at = datetime(2024, 2, 29, 1, 2, 3)  # noqa: DTZ001 - it has no zone.

    def batches(task: int) -> Any:
        return batches_of(
            [{"id": id_, "account": id_[-1], "at": at, "n": int(id_[1:])} for id_ in ids_of(task)]
        )

    options = {"table": "seen", "upsert": "account", "sequence_by": "n", "chunk": "50"}
    tasks = [place.task(None, **options) for _ in range(TASKS)]
    assert run_all(tasks, batches) == MESSAGES
    found = place.rows("SELECT account, n, at FROM seen")
    assert [(account, n) for account, n, _ in found] == [
        (str(n), MESSAGES - 10 + n) for n in range(10)
    ]
    assert {moment for *_, moment in found} == {at.replace(tzinfo=UTC)}
    assert place.ledger.counts() == {("tests", State.COMPLETED): MESSAGES}


def test_transactional(place: Place) -> None:
    """Each handler's row is there once."""
    begins = open_sessions(place.url)
    tasks = [
        task_of(place.ledger, book, place.folder, None, begins, chunk="50") for _ in range(TASKS)
    ]
    assert run_all(tasks, lambda n: batches_of_ids(ids_of(n))) == MESSAGES
    found = Counter(name for (name,) in place.rows("SELECT name FROM effects"))
    assert found == Counter(f"m{n:04}" for n in range(MESSAGES))
    begins.kw["bind"].dispose()


def test_leased(place: Place) -> None:
    """Each handler runs once."""
    ran: Counter[str] = Counter()
    lock = threading.Lock()

    def work(message: Message) -> None:
        with lock:
            ran[message.id] += 1

    tasks = [task_of(place.ledger, work, place.folder, chunk="50") for _ in range(TASKS)]
    assert run_all(tasks, lambda n: batches_of_ids(ids_of(n))) == MESSAGES
    assert ran == Counter(f"m{n:04}" for n in range(MESSAGES))
    with place.engine.connect() as connection:
        prepared = connection.execute(text("SELECT count(*) FROM pg_prepared_statements"))
        assert prepared.scalar_one() == 0
