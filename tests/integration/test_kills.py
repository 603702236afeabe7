"""A server that is killed again and again while workers claim and complete."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.drivers import connect_mysql, connect_postgresql, rows_of
from tests.integration.workers import HELD, Diary, read_diary, working
from tests.servers import MariaDb, Postgresql, Server

from oncely.core.record import Key
from oncely.ledger import open_ledger

_WORKERS = 3
_KILLS = {
    Postgresql: int(os.environ.get("ONCELY_TEST_KILLS_POSTGRESQL", "8")),
    MariaDb: int(os.environ.get("ONCELY_TEST_KILLS_MYSQL", "3")),
}
_DEADLINE_S = 60.0


@pytest.mark.timeout(60 + 10 * max(_KILLS.values()))
def test_killed_postgresql(private_postgresql: Postgresql, tmp_path: Path) -> None:
    """Nothing is granted twice, and nothing that was answered is lost."""
    _kill_again_and_again(private_postgresql, tmp_path)
    statement = "SELECT provider, message_id FROM processed_messages WHERE status = 'sent'"
    with closing(connect_postgresql(private_postgresql.url)) as connection:
        sent = {Key(*row) for row in connection.execute(statement)}
    _check(read_diary(tmp_path), sent)


@pytest.mark.timeout(60 + 10 * max(_KILLS.values()))
def test_killed_mariadb(private_mariadb: MariaDb, tmp_path: Path) -> None:
    """Nothing is granted twice, and nothing that was answered is lost."""
    _kill_again_and_again(private_mariadb, tmp_path)
    statement = "SELECT provider, message_id FROM processed_messages WHERE status = 'sent'"
    with closing(connect_mysql(private_mariadb.url)) as connection:
        sent = {Key(*row) for row in rows_of(connection, statement)}
    _check(read_diary(tmp_path), sent)


def _kill_again_and_again(server: Server, folder: Path) -> None:
    with closing(open_ledger(server.url)) as ledger:
        ledger.migrate()
    with working(server.url, folder, _WORKERS):
        for _ in range(_KILLS[type(server)]):
            seen = len(read_diary(folder).completed)
            # At any moment: it is their own work that the workers are killed in.
            more = random.randint(1, 300)
            _wait_until(lambda: len(read_diary(folder).completed) >= seen + more)  # noqa: B023
            server.kill()
            server.start()


def _check(diary: Diary, sent: set[Key]) -> None:
    assert [grant for grant, times in Counter(diary.grants).items() if times > 1] == []
    held = Counter(grant.message_id for grant in diary.grants if grant.consumer == HELD)
    assert [message_id for message_id, times in held.items() if times > 1] == []
    assert set(diary.completed) - sent == set()
    assert len(sent) > 100


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the workers do not get on"
        time.sleep(0.005)
