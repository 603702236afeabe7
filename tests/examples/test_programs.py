"""The starters that end by themselves: each runs the same again, and it happens once."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.conditions import wait_until
from tests.examples.running import EXAMPLES, Starter
from tests.integration.adapting import channel_to, publish

from oncely import Key, Ledger, open_ledger, open_transport


def test_script(tmp_path: Path) -> None:
    """The second run sends nothing; what is printed is what the README shows."""
    starter = Starter("script", tmp_path)
    said = starter.make()
    assert f"```text\n{said}```" in (EXAMPLES / "script" / "README.md").read_text()
    assert said.splitlines()[-2:] == ["2 letters sent so far"] * 2
    assert starter.make().splitlines() == ["2 letters sent so far"] * 2
    assert starter.lines("letters.txt") == ["invoice-1 anna", "invoice-2 ben"]


def test_celery(tmp_path: Path) -> None:
    """Two tasks for one order have one receipt, and the worker ends with what has sent them."""
    starter = Starter("celery", tmp_path)
    for _ in range(2):
        said = starter.make().splitlines()
        assert said[:3] == ["task 1: receipt 1", "task 2: receipt 1", "charged 1 time(s)"]
    assert starter.lines("charges.txt") == ["order-17 9900"]


def test_airflow(tmp_path: Path) -> None:
    """The function of the tasks, called again for the same day, returns what it did."""
    starter = Starter("airflow", tmp_path)
    runs = [f"run {run}: invoice 1, invoice 2" for run in (1, 2)]
    for _ in range(2):
        assert starter.make().splitlines()[-2:] == runs
    assert starter.lines("invoices.txt") == ["2026-11-20 anna", "2026-11-20 ben"]


def orders(starter: Starter) -> list[str]:
    """The rows that are committed."""
    with closing(sqlite3.connect(starter.folder / "out" / "shop.db")) as connection:
        return [name for [name] in connection.execute("SELECT name FROM orders ORDER BY name")]


def test_faststream(tmp_path: Path) -> None:
    """In memory: an order that comes twice is one row, and one mail leaves."""
    starter = Starter("faststream", tmp_path)
    for _ in range(2):
        assert starter.make().splitlines()[0] == "orders: 1"
    assert orders(starter) == ["order 17"]
    with closing(open_transport(f"sqlite:///{starter.folder}/out/mails.db")) as transport:
        transport.subscribe("mails", [])
        mails = transport.receive("mails", max_messages=10, wait_s=0)
    assert [mail.message.get("text") for mail in mails] == ["we have order 17"]


def duplicates(ledger: Ledger, message_id: str) -> int:
    """How often an order was delivered again."""
    record = ledger.find(Key("shop.take", message_id))
    return 0 if record is None else record.duplicates


def test_faststream_on_rabbitmq(rabbitmq_url: str, tmp_path: Path) -> None:
    """With a worker, a relay and a real broker: the same."""
    starter = Starter("faststream", tmp_path)
    (starter.folder / "out").mkdir()
    mails: list[str] = []
    with (
        closing(open_ledger(f"sqlite:///{starter.folder}/out/shop.db")) as ledger,
        closing(open_transport(rabbitmq_url)) as transport,
    ):
        ledger.migrate()
        transport.subscribe("mails", [])

        def received() -> int:
            taken = transport.receive("mails", max_messages=10, wait_s=0.1)
            mails.extend(each.message.get("text") for each in taken)
            return len(mails)

        with (
            starter.running("worker", BROKER_URL=rabbitmq_url) as worker,
            starter.running("relay", BROKER_URL=rabbitmq_url) as relay,
        ):
            with channel_to(rabbitmq_url) as channel:
                channel.queue_declare("orders", durable=True)
                for number in (17, 17, 18):
                    publish(channel, "orders", f"order-{number}", f"order {number}".encode())
            wait_until(lambda: duplicates(ledger, "order-17") == 1, programs=[worker])
            wait_until(lambda: received() == 2, programs=[worker, relay])
    assert orders(starter) == ["order 17", "order 18"]
    assert sorted(mails) == ["we have order 17", "we have order 18"]
