"""A server that is killed again and again while workers claim and complete."""

import os
import random
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from redis import Redis as Client
from tests.conditions import wait_until
from tests.integration.workers import HELD, Diary, read_diary, working
from tests.servers import Redis, Server
from tests.turns import in_turn

from oncely.core.record import Key, State
from oncely.ledger.ledger import open_ledger

_WORKERS = 3
_KILLS = {
    "postgresql": int(os.environ.get("ONCELY_TEST_KILLS_POSTGRESQL", "3")),
    "mariadb": int(os.environ.get("ONCELY_TEST_KILLS_MYSQL", "3")),
    "redis": 3,
}


@pytest.mark.in_turn("processes are killed")
@pytest.mark.timeout(600 + 10 * max(_KILLS.values()))
@pytest.mark.parametrize("name", in_turn("a server is killed", tuple(_KILLS)))
def test_killed_server(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Nothing is granted twice, and nothing that was answered is lost; in Redis, where that writes
    to its disk before each answer.
    """
    server: Server = request.getfixturevalue(f"private_{name}")
    _flush_always(server)
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
    with working(server.url, tmp_path, _WORKERS):
        for _ in range(_KILLS[name]):
            # At any moment: it is their own work that the workers are killed in.
            enough = len(read_diary(tmp_path).completed) + random.randint(1, 300)
            wait_until(partial(_has_completed, tmp_path, enough), "the workers do not get on")
            server.kill()
            server.start()
            _flush_always(server)
    with closing(open_ledger(server.url)) as ledger:
        records = [record for page in ledger.read() for record in page]
    completed = {record.key for record in records if record.state is State.COMPLETED}
    _check(read_diary(tmp_path), completed)


def _flush_always(server: Server) -> None:
    if isinstance(server, Redis):
        with Client.from_url(server.url) as client:
            client.config_set("appendfsync", "always")


def _has_completed(folder: Path, enough: int) -> bool:
    return len(read_diary(folder).completed) >= enough


def _check(diary: Diary, sent: set[Key]) -> None:
    assert [grant for grant, times in Counter(diary.grants).items() if times > 1] == []
    held = Counter(grant.message_id for grant in diary.grants if grant.consumer == HELD)
    assert [message_id for message_id, times in held.items() if times > 1] == []
    assert set(diary.completed) - sent == set()
    assert sent
