"""docs/how-to/migrate-celery-once.md: workers in processes, on RabbitMQ, Redis and PostgreSQL."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.conditions import wait_until
from tests.docs.celery_shop import BROKER, FOLDER, KEYS, LEDGER, RELEASE, application
from tests.integration.adapting import Effects, process
from tests.records import granted

import oncely

_DEADLINE_S = 60


class Shop:
    """Senders of every release, and workers of those that are started."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places
        self.effects = Effects(places[FOLDER])
        self.keys = redis.Redis.from_url(places[KEYS])
        self.ledger = oncely.open_ledger(places[LEDGER])
        self.ledger.migrate()
        self._open = ExitStack()
        self._open.callback(self.keys.close)
        self._open.callback(self.ledger.close)

    def sender(self, release: int) -> Any:
        """The task of a release, to be sent."""
        defined = application({**self._places, RELEASE: str(release)})
        self._open.callback(defined["app"].close)
        if "ledger" in defined:
            self._open.callback(defined["ledger"].close)
        return defined["invoice"]

    @contextmanager
    def worker(self, release: int) -> Iterator[None]:
        """A worker of a release, in a process."""
        words = ("celery", "--app=tests.docs.celery_shop", "worker", "--concurrency=1")
        quiet = (
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
            f"--hostname={release}@",
        )
        environment = {**self._places, RELEASE: str(release)}
        with process(*words, *quiet, "--loglevel=CRITICAL", environment=environment):
            yield

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def shop(
    rabbitmq_url: str,
    redis_url: str,
    postgresql_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shop]:
    """Nobody works there yet."""
    # celery-once keeps the first client of a process, whatever an application says later.
    monkeypatch.setattr("celery_once.backends.redis.redis", None)
    shop = Shop(
        {BROKER: rabbitmq_url, KEYS: redis_url, LEDGER: postgresql_url, FOLDER: str(tmp_path)}
    )
    yield shop
    shop.close()


def test_release_1_beside_the_old_version(shop: Shop) -> None:
    """Senders and workers of both share the keys: what is queued is not sent a second time by
    either, and after each task its key is free.
    """
    old, new = shop.sender(0), shop.sender(1)
    results = []
    for number in range(8):
        first, second = (old, new) if number % 2 else (new, old)
        results.append(first.apply_async(args=[f"order-{number}", 99]))
        assert second.apply_async(args=[f"order-{number}", 99]).state == "REJECTED"
    # The old one is killed first: what the new one has done and not acknowledged yet would be
    # delivered again, and the old one does not ask the ledger.
    with shop.worker(1), shop.worker(0):
        for number, result in enumerate(results):
            assert result.get(timeout=_DEADLINE_S) == f"invoice order-{number}"
        wait_until(lambda: not shop.keys.keys("qo_*"))
    assert [shop.effects.count(f"order-{n}") for n in range(8)] == [1] * 8


def test_release_1_does_once_what_is_sent_again(shop: Shop) -> None:
    """A second send after the end, which celery-once lets pass, returns the result of the first."""
    new = shop.sender(1)
    with shop.worker(1):
        for _ in range(3):
            result = new.apply_async(args=["order-1", 99])
            assert result.get(timeout=_DEADLINE_S) == "invoice order-1"
            wait_until(lambda: not shop.keys.keys("qo_*"))
    assert shop.effects.count("order-1") == 1


def test_a_task_that_waits_is_not_lost(shop: Shop) -> None:
    """A task of release 1 that meets another worker sends itself again, past its own key."""
    claim = granted(shop.ledger.claim(oncely.Key("invoice", "order-1"), "60s"))
    new = shop.sender(1)
    with shop.worker(1):
        result = new.apply_async(args=["order-1", 99])
        wait_until(lambda: result.state == "RETRY")
        shop.ledger.release(claim)
        assert result.get(timeout=_DEADLINE_S) == "invoice order-1"
    assert shop.effects.count("order-1") == 1


def test_release_2_beside_release_1(shop: Shop) -> None:
    """Workers of both know what the other has done, whoever sends it."""
    first, second = shop.sender(1), shop.sender(2)
    with shop.worker(1), shop.worker(2):
        for number in range(6):
            for sender in (second, second, first):
                result = sender.apply_async(args=[f"order-{number}", 99])
                assert result.get(timeout=_DEADLINE_S) == f"invoice order-{number}"
    assert [shop.effects.count(f"order-{n}") for n in range(6)] == [1] * 6
