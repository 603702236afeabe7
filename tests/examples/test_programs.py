"""The starters that end by themselves: each runs the same again, and it happens once."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.examples.running import EXAMPLES, Starter

from oncely import open_transport


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
