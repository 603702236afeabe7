"""A server that is killed again and again while workers claim and complete."""

import os
import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text
from tests.conditions import wait_until
from tests.integration.drivers import engine_on
from tests.integration.workers import HELD, Diary, read_diary, working
from tests.servers import Server
from tests.turns import in_turn

from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger

_WORKERS = 3
_KILLS = {
    "postgresql": int(os.environ.get("ONCELY_TEST_KILLS_POSTGRESQL", "3")),
    "mariadb": int(os.environ.get("ONCELY_TEST_KILLS_MYSQL", "3")),
}
_SENT = "SELECT provider, message_id FROM processed_messages WHERE status = 'sent'"


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(600 + 10 * max(_KILLS.values()))
@pytest.mark.parametrize("name", in_turn("a server is killed", tuple(_KILLS)))
def test_killed_server(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing is granted twice, and nothing that was answered is lost."""
    server: Server = request.getfixturevalue(f"private_{name}")
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
    with working(server.url, tmp_path, _WORKERS):
        for _ in range(_KILLS[name]):
            # At any moment: it is their own work that the workers are killed in.
            enough = len(read_diary(tmp_path).completed) + random.randint(1, 300)
            wait_until(partial(_has_completed, tmp_path, enough), "the workers do not get on")
            server.kill()
            server.start()
    engine = engine_on(server.url)
    with engine.connect() as connection:
        _check(read_diary(tmp_path), {Key(*row) for row in connection.execute(text(_SENT))})
    engine.dispose()


def _has_completed(folder: Path, enough: int) -> bool:
    return len(read_diary(folder).completed) >= enough


def _check(diary: Diary, sent: set[Key]) -> None:
    assert [grant for grant, times in Counter(diary.grants).items() if times > 1] == []
    held = Counter(grant.message_id for grant in diary.grants if grant.consumer == HELD)
    assert [message_id for message_id, times in held.items() if times > 1] == []
    assert set(diary.completed) - sent == set()
    assert sent
