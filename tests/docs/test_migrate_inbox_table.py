"""docs/how-to/migrate-inbox-table.md, on PostgreSQL: statements written by hand beside oncely."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from tests.docs.sections import Broker, Charges, Page, deliveries, dies
from tests.integration.drivers import connect_postgresql
from tests.integration.handwritten import TABLE, Service

import oncely

_COUNT = 60
_PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migrate-inbox-table.md"


class Statuses:
    """One worker of release 0, and one of release 1, on a table that was made by hand."""

    def __init__(self, url: str, send_sms: Any) -> None:
        page = Page("migrate-inbox-table", {"sqlite:///shop.db": url})
        self.connection = connect_postgresql(url)
        table = Service(self.connection, "sms-service")
        names = {"oncely": oncely, "table": table, "send_sms": send_sms}
        self.before = page.run("Before and after, with a status", names, 0)["handle_by_table"]
        self.zero = page.run("Release 0: requeue messages that are being processed", names)[
            "handle_by_table"
        ]
        after = page.run("Before and after, with a status", names, 1)
        self.first, self.ledger = after["handle"], after["ledger"]

    def close(self) -> None:
        self.connection.close()
        self.ledger.close()


@pytest.fixture
def statuses(postgresql_url: str, charges: Charges) -> Iterator[Statuses]:
    """A table with rows of before, taken over."""
    with closing(connect_postgresql(postgresql_url)) as connection:
        connection.execute(TABLE)
        before = Service(connection, "sms-service")
        for number in range(10):
            before.mark_processing(f"order-{number}", {})
            before.mark_sent(f"order-{number}")
    statuses = Statuses(postgresql_url, charges)
    yield statuses
    statuses.close()


def test_rollout_with_a_status(statuses: Statuses, charges: Charges, postgresql_url: str) -> None:
    """Workers of both versions do each message once at most: what failed once stays failed, for
    either, and what was sent before the table was taken over stays sent.
    """
    another = Statuses(postgresql_url, charges)
    with closing(another):
        handles = [statuses.zero, statuses.first, another.zero, another.first]
        Broker(deliveries(_COUNT)).drain_by(handles)
    assert charges.done == {f"order-{n}": 1 for n in range(10, _COUNT) if n % 7}
    states = Counter(record.state for record in statuses.ledger.scan(limit=1000))
    assert set(states) == {oncely.State.COMPLETED, oncely.State.FAILED}
    assert states[oncely.State.FAILED] == len(range(14, _COUNT, 7))


def test_roll_back_with_a_status(statuses: Statuses, charges: Charges) -> None:
    """What oncely did the old code does not repeat, neither release 0 nor the code before."""
    Broker(deliveries(_COUNT)).drain(statuses.first)
    done = dict(charges.done)
    for old in (statuses.zero, statuses.before):
        Broker(deliveries(_COUNT)).drain(old)
    assert charges.done == done


def test_a_worker_that_dies_with_a_status(
    statuses: Statuses, charges: Charges, postgresql_url: str
) -> None:
    """A message whose worker was killed is given back by both versions until somebody decides; the
    code before release 0 would have acknowledged it.
    """
    for number, name in ((11, "zero"), (12, "first")):
        message = oncely.Message(f"order-{number}")
        dies(lambda send: getattr(Statuses(postgresql_url, send), name)(message))  # noqa: B023
        with pytest.raises(Exception, match="order-1"):
            statuses.zero(message)
        with pytest.raises(oncely.BusyError):
            statuses.first(message)
        statuses.before(message)
        assert charges.done[message.id] == 0
        key = oncely.Key("sms-service", message.id)
        if name == "zero":
            statuses.ledger.forget(key)
        else:
            run_out = "UPDATE processed_messages SET lease_until = now() - interval '1 s'"
            statuses.connection.execute(run_out + " WHERE message_id = 'order-12'")
            with pytest.raises(oncely.InDoubtError):
                statuses.first(message)
            statuses.ledger.reset(key)
        statuses.first(message)
        assert charges.done[message.id] == 1


# ---- An inbox of ids ---------------------------------------------------------------------------


class Inboxes:
    """The version before and both releases, on one database."""

    def __init__(self, url: str, charges: Charges) -> None:
        def charge(connection: Connection, message: oncely.Message) -> None:
            connection.execute(text("INSERT INTO debits VALUES (:id)"), {"id": message.id})
            charges(message)

        page = Page("migrate-inbox-table", {"sqlite:///shop.db": url})
        with closing(connect_postgresql(url)) as connection:
            connection.execute("CREATE TABLE inbox (message_id VARCHAR(255) PRIMARY KEY)")
            connection.execute("CREATE TABLE debits (id TEXT)")
        names = {"oncely": oncely, "charge": charge}
        before = page.run("Before and after, in one transaction", names, 0)
        after = page.run("Before and after, in one transaction", before, 1)
        self.zero, self.second = before["handle"], after["handle"]
        self.first = page.run("Release 1: both tables", after)["handle"]
        self.ledger: oncely.Ledger = after["ledger"]
        self.engine: Engine = before["engine"]
        self.copy = page.run("Release 2: without the inbox", after)["copy_inbox_to_ledger"]
        self.copy_back = page.run("Roll back, in one transaction", after)["copy_ledger_to_inbox"]

    def debits(self) -> dict[str, int]:
        """How often each message was charged, as far as that is stored."""
        with self.engine.connect() as connection:
            return Counter(connection.execute(text("SELECT id FROM debits")).scalars())

    def close(self) -> None:
        self.ledger.close()
        self.engine.dispose()


@pytest.fixture
def inboxes(postgresql_url: str, charges: Charges) -> Iterator[Inboxes]:
    """All of them."""
    inboxes = Inboxes(postgresql_url, charges)
    yield inboxes
    inboxes.close()


@pytest.mark.parametrize("pair", [("zero", "first"), ("first", "second")])
def test_each_rollout_of_an_inbox(inboxes: Inboxes, pair: tuple[str, str]) -> None:
    """Workers of a version and of the next one store each debit once, whoever gets the message."""
    old, new = (getattr(inboxes, name) for name in pair)
    Broker(deliveries(_COUNT)).drain_by([old, new, old, new])
    assert inboxes.debits() == {f"order-{n}": 1 for n in range(_COUNT)}


@pytest.mark.parametrize("how", ["SQL", "calls"])
def test_there_and_back(inboxes: Inboxes, how: str) -> None:
    """Ids that were copied are known to release 2, and what that did to the version before."""
    Broker(deliveries(_COUNT)).drain(inboxes.zero)
    if how == "calls":
        assert inboxes.copy() == _COUNT
        assert inboxes.copy() == 0
    else:
        found = re.search(
            r"^INSERT INTO processed_messages.*?;", _PAGE.read_text(), re.MULTILINE | re.DOTALL
        )
        assert found
        with inboxes.engine.begin() as connection:
            assert connection.execute(text(found[0])).rowcount == _COUNT
    more = deliveries(2 * _COUNT)
    Broker(more).drain(inboxes.second)
    inboxes.copy_back()
    Broker(more).drain(inboxes.zero)
    assert inboxes.debits() == {f"order-{n}": 1 for n in range(2 * _COUNT)}
