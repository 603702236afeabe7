"""docs/how-to/migrate-powertools.md: Powertools' records in Redis, a ledger in PostgreSQL."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError
from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer
from tests.docs.sections import Broker, Charges, Page, deliveries, dies
from tests.records import record_of

import oncely

_COUNT = 60

# Powertools warns of the old name of this class, whichever is used.
pytestmark = pytest.mark.filterwarnings("ignore:Redis:DeprecationWarning")


class Context:
    """What Lambda tells a function of its own end."""

    def get_remaining_time_in_millis(self) -> int:
        return 900_000


class Releases:
    """The version before and the page's two releases, each at the same servers."""

    def __init__(self, postgresql_url: str, redis_url: str, charge: Callable[..., object]) -> None:
        page = Page("migrate-powertools", {"sqlite:///shop.db": postgresql_url})
        self.client = redis.Redis.from_url(redis_url, decode_responses=True)
        client: Any = self.client
        names: dict[str, Any] = {
            "__name__": "billing",
            "persistence": CachePersistenceLayer(client=client),
            "take_money": lambda order: {"receipt": charge(oncely.Message(order["id"]))},
        }
        imports = page.run("Before and after", names, 0)
        imports["config"].register_lambda_context(Context())
        before = page.run("Before and after", imports, 2)
        after = page.run("Before and after", before, 3)
        self.ledger: oncely.Ledger = after["ledger"]
        self.zero, self.second = before["charge"], after["charge"]
        self.first = page.run("Release 1: both", after)["charge"]

    def close(self) -> None:
        self.ledger.close()
        self.client.close()


@pytest.fixture
def releases(
    postgresql_url: str, redis_url: str, charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Releases]:
    """All of them."""
    monkeypatch.setenv("AWS_LAMBDA_FUNCTION_NAME", "billing")
    releases = Releases(postgresql_url, redis_url, charges)
    yield releases
    releases.close()


def _by_message(charge: Callable[..., Any]) -> Callable[[oncely.Message], object]:
    return lambda message: charge(order={"id": message.id})


@pytest.mark.parametrize("pair", [("zero", "first"), ("first", "second")])
def test_each_rollout(releases: Releases, charges: Charges, pair: tuple[str, str]) -> None:
    """A release and the one before it charge each order once, whoever gets it."""
    old, new = (_by_message(getattr(releases, name)) for name in pair)
    Broker(deliveries(_COUNT)).drain_by([old, new, old, new])
    assert charges.done == {f"order-{n}": 1 for n in range(_COUNT)}


def test_results_are_taken_over(releases: Releases, charges: Charges) -> None:
    """What the version before has kept is given by every later one, and by an earlier one again."""
    kept = {"receipt": "receipt for order-1"}
    for charge in (releases.zero, releases.first, releases.second, releases.first, releases.zero):
        assert charge(order={"id": "order-1"}) == kept
    assert charges.done == {"order-1": 1}
    assert record_of(releases.ledger, oncely.Key("billing", "order-1")).result == kept


def test_a_process_that_dies_loses_nothing(
    releases: Releases, charges: Charges, postgresql_url: str, redis_url: str
) -> None:
    """An order whose process of release 1 was killed is refused by both versions, and runs when
    Powertools' record has expired.
    """
    order = {"id": "order-1"}
    dies(lambda charge: Releases(postgresql_url, redis_url, charge).first(order=order))
    with pytest.raises(IdempotencyAlreadyInProgressError):
        releases.zero(order={"id": "order-1"})
    with pytest.raises(oncely.BusyError):
        releases.first(order={"id": "order-1"})
    assert charges.done == {}
    [name] = releases.client.keys("*")
    releases.client.delete(name)  # it expires
    releases.zero(order={"id": "order-1"})
    assert charges.done == {"order-1": 1}
