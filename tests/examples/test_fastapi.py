"""The starter for FastAPI: a charge that is sent again, and an event that Stripe delivers again."""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.conditions import wait_until
from tests.examples.running import Starter


def test_as_the_readme_shows_it(tmp_path: Path) -> None:
    """`make try` sends both twice, with a signature of its own: each has one effect."""
    shop = Starter("fastapi", tmp_path)

    def rows(table: str) -> int:
        with closing(sqlite3.connect(shop.folder / "out" / "shop.db")) as connection:
            [count] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)

    with shop.serving():
        answers = shop.make("try", PORT=shop.url.rpartition(":")[2]).splitlines()
        statuses = [line.split(" ")[1] for line in answers if line.startswith("HTTP/")]
        assert statuses == ["201", "201", "202", "200"]
        assert answers.count('{"charge":1}') == 2
        wait_until(lambda: rows("payments"))
        assert [rows("charges"), rows("payments")] == [1, 1]
