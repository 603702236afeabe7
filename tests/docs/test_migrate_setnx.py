"""docs/how-to/migrate-setnx.md: keys in a real Redis, a ledger in a real PostgreSQL."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from tests.docs.sections import Broker, Charges, Page, deliveries, dies

import oncely

_COUNT = 60


class Releases:
    """The page's three releases and the code before them, at the same servers."""

    def __init__(self, postgresql_url: str, redis_url: str, charge: Callable[..., object]) -> None:
        places = {"sqlite:///shop.db": postgresql_url, "redis://localhost:6379/0": redis_url}
        page = Page("migrate-setnx", places)
        names: dict[str, Any] = {"charge": charge}
        before = page.run("Before and after", names, 0)
        after = page.run("Before and after", before)
        first = page.run("Release 1: two values in the old code", after)
        second = page.run("Release 2: the ledger around the old code", first)
        self.zero, self.third = before["handle"], after["handle"]
        self.first, self.second = first["handle_with_key"], second["handle"]
        self.ledger: oncely.Ledger = after["ledger"]
        self.client: redis.Redis = after["client"]
        self.copy_keys = page.run("Release 3: without the key", second)["copy_keys_to_ledger"]
        self.copy_ledger = page.run("Roll back", second)["copy_ledger_to_keys"]

    def close(self) -> None:
        self.ledger.close()
        self.client.close()


@pytest.fixture
def releases(postgresql_url: str, redis_url: str, charges: Charges) -> Iterator[Releases]:
    """All of them."""
    releases = Releases(postgresql_url, redis_url, charges)
    yield releases
    releases.close()


@pytest.mark.parametrize("pair", [("zero", "first"), ("first", "second"), ("second", "third")])
def test_each_rollout(releases: Releases, charges: Charges, pair: tuple[str, str]) -> None:
    """Workers of a release and of the next one handle each message once, whoever gets it."""
    old, new = (getattr(releases, name) for name in pair)
    Broker(deliveries(_COUNT)).drain_by([old, new, old, new])
    assert charges.done == {f"order-{n}": 1 for n in range(_COUNT)}


def test_all_releases_after_each_other(releases: Releases, charges: Charges) -> None:
    """What one release did no later one repeats, nor an earlier one after a way back."""
    for handle in (releases.zero, releases.first, releases.second):
        Broker(deliveries(_COUNT)).drain(handle)
    copied = releases.copy_keys()
    Broker(deliveries(_COUNT)).drain(releases.third)
    assert copied == 0  # release 2 met all of them
    more = deliveries(2 * _COUNT)
    Broker(more).drain(releases.third)
    releases.copy_ledger()
    Broker(more).drain(releases.first)
    assert charges.done == {f"order-{n}": 1 for n in range(2 * _COUNT)}


def test_keys_are_copied(releases: Releases, charges: Charges) -> None:
    """Without the wait, release 3 knows from the ledger what release 1 and older ones did."""
    Broker(deliveries(10)).drain(releases.zero)
    Broker(deliveries(_COUNT)).drain(releases.first)
    releases.client.set("seen:order-100", "working", ex=600)
    assert releases.copy_keys() == _COUNT
    Broker(deliveries(_COUNT)).drain(releases.third)
    assert charges.done == {f"order-{n}": 1 for n in range(_COUNT)}
    assert releases.ledger.find(oncely.Key("billing", "order-100")) is None


@pytest.mark.parametrize("dying", ["first", "second"])
def test_a_worker_that_dies_loses_nothing(
    releases: Releases, charges: Charges, dying: str, postgresql_url: str, redis_url: str
) -> None:
    """A message whose worker was killed is given back by both versions, and runs when the key has
    expired.
    """
    message = oncely.Message("order-1")
    dies(lambda charge: getattr(Releases(postgresql_url, redis_url, charge), dying)(message))
    for handle in (releases.first, releases.second):
        with pytest.raises(Exception, match=r"order-1|another"):
            handle(message)
    assert charges.done == {}
    releases.client.delete("seen:order-1")  # it expires
    if dying == "second":
        releases.first(message)
    else:
        releases.second(message)
    assert charges.done == {"order-1": 1}


def test_the_code_before_loses_it(releases: Releases, charges: Charges) -> None:
    """The page says so: what a worker of the code before died over is acknowledged, and lost."""
    releases.client.set("seen:order-1", "1", ex=600)  # as a killed worker leaves it
    releases.zero(oncely.Message("order-1"))
    assert charges.done == {}
