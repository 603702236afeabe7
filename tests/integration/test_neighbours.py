"""Writers of different keys, in transactions with a server's own settings, do not meet."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from tests.integration.callers import Place
from tests.records import granted

from oncely.core.errors import StoreError
from oncely.core.record import Key
from oncely.tracker import MessageTracker

THREADS, EACH = 8, 40

Meet = Callable[[], object]
"""Waits until all threads have looked."""


def track(_: Place, connection: Connection, message_id: str, meet: Meet) -> None:
    """As the tracker is to be used."""
    tracker = MessageTracker(connection, "billing")
    assert not tracker.has_processed(message_id)
    meet()
    tracker.mark_as_processed(message_id)


def look_and_claim(place: Place, connection: Connection, message_id: str, meet: Meet) -> None:
    """A look, and then a claim."""
    key = Key("billing", message_id)
    with place.ledger.transaction(connection) as inbox:
        assert inbox.find(key) is None
        meet()
        inbox.complete(granted(inbox.claim(key)))
        assert inbox.find(key) is not None


# Whose sessions are at REPEATABLE READ, its default.
@pytest.mark.parametrize("place", ["mysql"], indirect=True)
@pytest.mark.parametrize("work", [track, look_and_claim])
def test_different_ids(place: Place, work: Callable[[Place, Connection, str, Meet], None]) -> None:
    """Threads that look for ids of their own, all at once, and then mark them, never deadlock."""
    together = Barrier(THREADS, timeout=60)

    def run(thread: int) -> Counter[str]:
        errors = Counter[str]()
        for n in range(EACH):
            try:
                with place.engine.begin() as connection:
                    work(place, connection, f"{n}-{thread}", together.wait)
            except (StoreError, DBAPIError) as error:
                errors[str(error)[:200]] += 1
        return errors

    with ThreadPoolExecutor(THREADS) as threads:
        errors = sum(threads.map(run, range(THREADS)), Counter[str]())
    assert errors == {}
