"""The starters for Flask and Django: a request that is sent again has no second effect."""

import sqlite3
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from tests.examples.running import Starter


def post(url: str, key: str | None, content: dict[str, str]) -> httpx.Response:
    """Send a request."""
    headers = {} if key is None else {"Idempotency-Key": f'"{key}"'}
    return httpx.post(url, headers=headers, timeout=60, json=content)


def check_tried(starter: Starter, body: str) -> None:
    """`make try` shows the first answer and its repetition."""
    answers = starter.make("try", PORT=starter.url.rpartition(":")[2]).splitlines()
    assert [line.split(" ")[1] for line in answers if line.startswith("HTTP/")] == ["201", "201"]
    assert answers.count("Idempotency-Replayed: true") == 1
    assert answers.count(body) == 2


def test_flask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its processes takes the repetition, the letter is sent once."""
    # There gunicorn has its control socket.
    monkeypatch.setenv("HOME", str(tmp_path))
    starter, anna = Starter("flask", tmp_path), {"customer": "anna"}
    with starter.serving() as url:
        repeated = [post(f"{url}/letters", "18", anna) for _ in range(20)]
        assert {answer.status_code for answer in repeated} == {201}
        assert post(f"{url}/letters", None, anna).status_code == 400
        check_tried(starter, '{"letter":"to anna"}')
    assert starter.lines("letters.txt") == ["18 anna", "order-17 anna"]


def test_django(tmp_path: Path) -> None:
    """The row of the charge is written once."""
    starter = Starter("django", tmp_path)
    with starter.serving():
        check_tried(starter, '{"charge": 1}')
    with closing(sqlite3.connect(starter.folder / "out" / "shop.db")) as connection:
        assert connection.execute("SELECT count(*) FROM charges").fetchone() == (1,)
