"""A ledger whose PostgreSQL fails over to a replica, or is restored from a backup."""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, text
from tests.conditions import wait_until
from tests.logs import of_event
from tests.records import granted
from tests.server_fixtures import available
from tests.servers import HOST, Postgresql

from oncely import (
    Consumer,
    ConsumerReport,
    Duplicate,
    Granted,
    Key,
    Message,
    TooOld,
    once,
    open_transport,
)
from oncely.core.errors import StoreUnavailable
from oncely.ledger.ledger import Ledger, open_ledger

BEFORE, LOST = Key("billing", "before"), Key("billing", "lost")
PAGES = Path(__file__).parents[2] / "docs/how-to"

pytestmark = pytest.mark.in_turn("failovers")


class Copy(Postgresql):
    """A base backup of another server; a replica of it, unless it is told to be something else."""

    programs = ("pg_basebackup", "postgres")

    def __init__(self, primary: Postgresql) -> None:
        super().__init__()
        self._primary = primary

    def _prepare(self) -> None:
        backup, _ = self._programs
        options = ("--write-recovery-conf", "--checkpoint=fast", "--no-sync")
        self._run(backup, f"--pgdata={self.data}", f"--dbname={self._primary.url}", *options)


def told(server: Postgresql, *statements: str) -> Any:
    """What the server answers to the last."""
    with closing(psycopg.connect(server.url, autocommit=True)) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def primary() -> Iterator[Postgresql]:
    """A server with a ledger."""
    with available(Postgresql) as server:
        with closing(open_ledger(server.url)) as ledger:
            ledger.migrate()
        yield server


class Pair(NamedTuple):
    """A server, a replica of it, and the ledger at the URL of both, as the page has it."""

    primary: Postgresql
    replica: Postgresql
    url: str
    ledger: Ledger

    def promote(self) -> None:
        """The server dies, and the replica takes its place."""
        self.primary.kill()
        told(self.replica, "SELECT pg_promote()")


@pytest.fixture
def pair(primary: Postgresql) -> Iterator[Pair]:
    """Both at work."""
    with Copy(primary) as replica:
        servers = f"host={HOST}:{primary.port}&host={HOST}:{replica.port}"
        url = f"postgresql://oncely@/postgres?{servers}&target_session_attrs=read-write"
        with closing(open_ledger(url)) as ledger:
            yield Pair(primary, replica, url, ledger)


def complete(ledger: Ledger, key: Key) -> None:
    ledger.complete(granted(ledger.claim(key)))


def cut(primary: Postgresql, replica: Postgresql, *_: object) -> None:
    """Let the replica get what the primary has, and nothing more."""
    [(position,)] = told(primary, "SELECT pg_current_wal_lsn()::text")
    arrived = f"SELECT 1 WHERE pg_last_wal_replay_lsn() >= '{position}'"
    wait_until(lambda: told(replica, arrived))
    told(replica, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
    wait_until(lambda: not told(replica, "SELECT 1 FROM pg_stat_wal_receiver"))


def raise_horizons(server: Postgresql, until: float) -> None:
    """By the statements of the documentation."""
    pages = "\n".join(page.read_text() for page in PAGES.rglob("*.md"))
    [block] = re.findall(r"```sql\n( *INSERT INTO message_consumers .*?)```", pages, re.DOTALL)
    told(server, *re.sub(r"\b\d{10}\b", str(until), block).split(";")[:-1])


@pytest.mark.parametrize("is_mended", [False, True])
def test_lost_commits(pair: Pair, is_mended: bool, caplog: pytest.LogCaptureFixture) -> None:
    """What an asynchronous replica has not received is lost: such a message runs again when it is
    delivered again, unless the horizon is raised; then it is a dead letter, which can be retried.
    """
    handled: list[str] = []
    ledger = pair.ledger
    queue = open_transport("memory://failover")
    consumer = Consumer(queue, "orders").idempotent(ledger, "billing")

    def deliver(sent_at: float, *ids: str) -> ConsumerReport:
        messages = [Message(id_, time=datetime.fromtimestamp(sent_at, UTC)) for id_ in ids]
        queue.publish("orders", messages)
        return consumer.consume(lambda message: handled.append(message.id), drain=True)

    sent_at = ledger.now()
    deliver(sent_at, "before")
    cut(*pair)
    deliver(sent_at, "lost")
    ledger.recorder.tell()
    pair.promote()
    with caplog.at_level(logging.ERROR, "oncely"):
        ledger.recorder.tell()
    assert of_event(caplog, "ledger_set_back")
    if is_mended:
        raise_horizons(pair.replica, ledger.now())
    report = deliver(sent_at, "before", "lost")
    assert (report.duplicates, report.dead_lettered) == (1, int(is_mended))
    assert handled == ["before", "lost", *([] if is_mended else ["lost"])]
    if is_mended:
        [letter] = ledger.dead()
        ledger.retry_dead(letter.id)
        deliver(ledger.now(), "new")
        assert sorted(handled[2:]) == ["lost", "new"]


def test_rows_are_lost_with_their_records(pair: Pair) -> None:
    """Work transactions that the replica lacks left neither rows nor records: what is delivered
    again writes the missing rows, and no other.
    """
    told(pair.primary, "CREATE TABLE rows (id text)")
    engine = create_engine(pair.url.replace("postgresql:", "postgresql+psycopg:"))

    @once(pair.ledger, consumer="rows", key=str, transaction=engine)
    def write(id_: str, connection: Connection) -> None:
        connection.execute(text("INSERT INTO rows VALUES (:id)"), {"id": id_})

    write("before")
    cut(*pair)
    write("lost")
    pair.promote()
    for id_ in ("before", "lost"):
        write(id_)
    assert told(pair.replica, "SELECT id FROM rows ORDER BY id") == [("before",), ("lost",)]
    engine.dispose()


def test_nothing_is_lost(pair: Pair) -> None:
    """While the only synchronous replica is away calls wait; of what was answered, a replica that
    is promoted has everything.
    """
    primary, replica, _, ledger = pair
    told(primary, "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
    replica.stop()
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    with ThreadPoolExecutor(4) as pool:
        call = pool.submit(complete, ledger, LOST)
        wait_until(lambda: told(primary, waiting))
        assert not call.done()
        replica.start()
        call.result()
        answered: list[Key] = []

        def work(name: str) -> None:
            with suppress(StoreUnavailable):
                for number in count():
                    complete(ledger, key := Key("billing", f"{name}-{number}"))
                    answered.append(key)

        working = [pool.submit(work, name) for name in "abc"]
        wait_until(lambda: len(answered) > 100)
        primary.kill()
        for each in working:
            each.result()
    pair.promote()
    for key in [LOST, *answered]:
        assert isinstance(ledger.claim(key), Duplicate)


@pytest.fixture
def backup(primary: Postgresql) -> Iterator[Copy]:
    """Of a server that archives its log."""
    keep = f"mkdir -p {primary.folder}/archive && cp %p {primary.folder}/archive/%f"
    to = f"ALTER SYSTEM SET archive_command = '{keep}'"
    told(primary, "ALTER SYSTEM SET archive_mode = on", to)
    primary.restart()
    with closing(Copy(primary)) as copy:
        # Now, and not when it starts.
        copy._prepare()
        (copy.data / "standby.signal").rename(copy.data / "recovery.signal")
        with (copy.data / "postgresql.auto.conf").open("a") as settings:
            settings.write(
                f"restore_command = 'cp {primary.folder}/archive/%f %p'\n"
                "recovery_target_name = 'night'\nrecovery_target_action = 'promote'\n"
            )
        yield copy


def test_restored(primary: Postgresql, backup: Copy) -> None:
    """Records and horizon are as they were: what was handled since, or even purged, runs again
    until the horizon is raised to the end of the lost time.
    """
    with closing(open_ledger(primary.url)) as ledger:
        sent_at = ledger.now()
        complete(ledger, BEFORE)
        told(primary, "SELECT pg_create_restore_point('night')")
        complete(ledger, LOST)
        wait_until(lambda: ledger.purge("0s") == 0)
        assert isinstance(ledger.claim(LOST, sent_at=sent_at), TooOld)
    told(primary, "SELECT pg_switch_wal()")
    primary.stop()
    backup.start()
    wait_until(lambda: told(backup, "SELECT 1 WHERE NOT pg_is_in_recovery()"))
    with closing(open_ledger(backup.url)) as ledger:
        assert isinstance(ledger.claim(BEFORE, sent_at=sent_at), Duplicate)
        outcome = ledger.claim(LOST, sent_at=sent_at)
        assert isinstance(outcome, Granted)
        ledger.release(outcome.claim)
        raise_horizons(backup, ledger.now())
        assert isinstance(ledger.claim(LOST, sent_at=sent_at), TooOld)
        assert isinstance(ledger.claim(BEFORE, sent_at=sent_at), Duplicate)
