"""docs/how-to/migrate-annotated-consumers.md: rows and records in one PostgreSQL."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from sqlalchemy import Connection, Engine, text
from tests.docs.sections import Broker, Charges, Handle, Page, deliveries
from tests.integration.drivers import connect_postgresql

import oncely

_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-annotated-consumers.md"
_COUNT = 60


class Shop:
    """The version before and both releases, of one of the page's two shapes."""

    def __init__(self, url: str, shape: str) -> None:
        charges = Charges()

        def store(connection: Connection, message: oncely.Message) -> None:
            connection.execute(text("INSERT INTO stored VALUES (:id)"), {"id": message.id})
            charges(message)

        with closing(connect_postgresql(url)) as connection:
            connection.execute("CREATE TABLE stored (id TEXT)")
            connection.execute(
                "CREATE TABLE seen_messages (message_id TEXT, queue TEXT,"
                " PRIMARY KEY (message_id, queue))"
            )
            connection.execute("CREATE TABLE tracked_messages (message_id TEXT PRIMARY KEY)")
        page = Page("migrate-annotated-consumers", {"sqlite:///shop.db": url})
        heading = f"{shape}: before and after"
        shared = page.run("Annotated consumers: before and after", {"store": store}, 0)
        self.engine: Engine = shared["engine"]
        self._name = "handle" if shape == "A tracker" else "receive"
        # The first block of the other shape is shared.
        before = page.run(heading, shared, 0) if shape == "A tracker" else shared
        before = page.run(heading, before, 1)
        after = page.run(heading, before, 2)
        first = page.run(f"Release 1: {shape[0].lower()}{shape[1:]}", after)
        self.releases: list[Handle] = [each[self._name] for each in (before, after, first)]
        self.before, self.second, self.first = self.releases
        self.ledger: oncely.Ledger = after["ledger"]
        self._page, self._after = page, after

    def stored(self) -> dict[str, int]:
        """How often each message is stored."""
        with self.engine.connect() as connection:
            return Counter(connection.execute(text("SELECT id FROM stored")).scalars())

    def copy(self) -> tuple[int, int]:
        """How many messages of either shape were copied."""
        copied = self._page.run("Release 2: without the old table", self._after)["copied"]
        return cast(tuple[int, int], copied)

    def copy_back(self) -> None:
        """The page's statements."""
        found = re.findall(r"^```sql\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
        with self.engine.begin() as connection:
            for statement in found[-1].split(";")[:2]:
                connection.execute(text(statement))


@pytest.fixture(params=["Annotated consumers", "A tracker"])
def shop(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[Shop]:
    """One of each shape."""
    shop = Shop(postgresql_url, request.param)
    yield shop
    shop.ledger.close()
    shop.engine.dispose()


@pytest.mark.parametrize("pair", [("before", "first"), ("first", "second")])
def test_each_rollout(shop: Shop, pair: tuple[str, str]) -> None:
    """Workers of a version and of the next one store each message once, whoever gets it."""
    old, new = (getattr(shop, name) for name in pair)
    Broker(deliveries(_COUNT)).drain_by([old, new, old, new])
    assert shop.stored() == {f"order-{n}": 1 for n in range(_COUNT)}


def test_there_and_back(shop: Shop) -> None:
    """What was copied is known to release 2, and what that stored to the version before."""
    Broker(deliveries(_COUNT)).drain(shop.before)
    assert sum(shop.copy()) == _COUNT
    more = deliveries(2 * _COUNT)
    Broker(more).drain(shop.second)
    shop.copy_back()
    Broker(more).drain(shop.before)
    assert shop.stored() == {f"order-{n}": 1 for n in range(2 * _COUNT)}
