"""A ledger that is as it was earlier, a file that is another one, and names nobody works under."""

import logging
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, insert, text
from sqlalchemy.orm import Session
from tests.conditions import wait_until
from tests.conformance.conftest import ledger_url_of
from tests.logs import of_event
from tests.records import granted

from oncely import ops
from oncely.consumer import Consumer
from oncely.core.activity import Worker
from oncely.core.commands import Duplicate, Granted, TooOld
from oncely.core.errors import StoreError
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.once import once
from oncely.stores.open_store import open_sessions
from oncely.transports.open_transport import open_transport
from oncely.transports.transport import Transport

KEY = Key("billing", "order-1")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty ledger in a file, or in the database that is asked for."""
    return ledger_url_of(getattr(request, "param", "sqlite"), request)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """The ledger there."""
    with closing(open_ledger(url)) as opened:
        yield opened


on_every_database = pytest.mark.parametrize("url", ["sqlite", "postgresql", "mysql"], indirect=True)


class Backup:
    """All rows of a database, to be put back."""

    def __init__(self, url: str) -> None:
        drivers = {"postgresql:": "postgresql+psycopg:", "mysql:": "mysql+pymysql:"}
        kind = f"{url.partition(':')[0]}:"
        self._engine = create_engine(url.replace(kind, drivers.get(kind, kind), 1))
        self._tables = MetaData()
        self._tables.reflect(self._engine)
        with self._engine.begin() as connection:
            self._rows: Rows = {
                table.name: [{**row} for row in connection.execute(table.select()).mappings()]
                for table in self._tables.sorted_tables
            }

    def restore(self) -> None:
        """As an operator does, while others work."""
        with self._engine.begin() as connection:
            for table in self._tables.sorted_tables:
                connection.execute(table.delete())
                if rows := self._rows[table.name]:
                    connection.execute(insert(table), rows)
        self._engine.dispose()


def complete(ledger: Ledger, key: Key) -> None:
    ledger.complete(granted(ledger.claim(key)))


# ---- Set back ----------------------------------------------------------------------------------


@on_every_database
@pytest.mark.parametrize("was_there", [True, False])
def test_worker_notices(url: str, was_there: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A worker whose last sign of life is gone says so, once; so does the check of any process,
    and what the docs say to type keeps what was handled from running again.
    """
    with closing(open_ledger(url)) as ledger, closing(open_ledger(url)) as other:
        backup = None if was_there else Backup(url)
        complete(ledger, Key("billing", "before"))
        ledger.recorder.tell()
        backup = backup or Backup(url)
        complete(ledger, KEY)
        ledger.recorder.tell()
        assert isinstance(ledger.claim(KEY), Duplicate)
        sent_at = ledger.now()
        assert ops.problems(other) == []
        backup.restore()
        with caplog.at_level(logging.ERROR, "oncely"):
            ledger.recorder.tell()
            ledger.recorder.tell()
        [record] = of_event(caplog, "ledger_set_back")
        assert record.levelname == "ERROR"
        [problem] = ops.problems(other)
        assert problem.startswith("The ledger was set back, by a restore or a failover: what was")
        assert vars(record)["until"] in problem
        [entry] = other.operations.audit(10)
        assert (entry.action, entry.changed) == ("set back", 0)
        if was_there:
            _raise_horizons(url, other.now())
            assert isinstance(other.claim(KEY, sent_at=sent_at), TooOld)
            assert isinstance(other.claim(Key("billing", "before")), Duplicate)


def _raise_horizons(url: str, until: float) -> None:
    """By the statements of the documentation."""
    page = (Path(__file__).parents[2] / "docs/how-to/maintain.md").read_text()
    [block] = re.findall(r"```sql\n( +INSERT INTO message_consumers .*?)```", page, re.DOTALL)
    engine = create_engine(
        url.replace("postgresql:", "postgresql+psycopg:").replace("mysql:", "mysql+pymysql:")
    )
    with engine.begin() as connection:
        for statement in re.sub(r"\b\d{10}\b", str(until), block).split(";")[:-1]:
            connection.execute(text(statement))
    engine.dispose()


@on_every_database
def test_too_old_and_retried(ledger: Ledger) -> None:
    """A message that is too old is a dead letter, and runs when somebody has looked and retries it:
    else nobody could let it run.
    """
    complete(ledger, KEY)
    wait_until(lambda: ledger.purge("0s"))
    queue = _queue("too-old", time=datetime.now(UTC) - timedelta(hours=1))
    handled: list[Message] = []
    consumer = Consumer(queue, "orders").idempotent(ledger, KEY.consumer)
    assert consumer.consume(handled.append, drain=True).dead_lettered == 1
    [letter] = ledger.dead()
    assert ledger.retry_dead(letter.id) == 1
    assert consumer.consume(handled.append, drain=True).handled == 1
    assert [*ledger.dead()] == []


def test_nothing_is_set_back(ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that has ended, was purged with others, or begins again, says nothing."""
    for _ in range(2):
        complete(ledger, Key("billing", str(ledger.now())))
        ledger.recorder.tell()
        ledger.operations.purge_operations(3600.0)
        ledger.recorder.tell()
        ledger.close()
    assert of_event(caplog, "ledger_set_back") == []
    assert ops.problems(ledger) == []


# ---- A file ------------------------------------------------------------------------------------


def _removed(file: Path) -> None:
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()


def _replaced(file: Path) -> None:
    copy = file.with_name("copy.db")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(f"VACUUM INTO '{copy}'")
    _removed(file)
    copy.replace(file)


def _moved(file: Path) -> None:
    file.rename(file.with_name("moved.db"))


@pytest.mark.parametrize("change", [_removed, _replaced, _moved])
def test_another_file(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """A process that has a file open says so where it is gone, or another: it does not go on with
    one that nobody else sees, nor with one that lacks what it knows.
    """
    file = tmp_path / "ledger.db"
    url = f"sqlite:///{file}"
    handled: list[str] = []
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        complete(ledger, KEY)

        @once(ledger, consumer="billing", key=lambda id_: id_)
        def charge(id_: str) -> None:
            handled.append(id_)

        @once(ledger, consumer="books", key=lambda id_, *_: id_, transaction=open_sessions(url))
        def book(id_: str, _: Session) -> None:
            handled.append(id_)

        book("2")
        handled.clear()
        change(file)
        consumer = Consumer(_queue("orders-of-a-file"), "orders").idempotent(ledger, "billing")
        for call in (
            lambda: ledger.claim(Key("billing", "5")),
            lambda: charge("3"),
            ledger.recorder._tell,
            lambda: book("4"),
            lambda: consumer.consume(lambda message: handled.append(message.id), drain=True),
        ):
            with pytest.raises(StoreError, match="the file was removed or replaced while") as told:
                call()
            assert "\n" not in str(told.value)
        assert handled == []
    with closing(open_ledger(url)) as afresh:
        afresh.migrate()
        kind = Duplicate if change is _replaced else Granted
        assert isinstance(afresh.claim(KEY), kind)


def _queue(name: str, **fields: Any) -> Transport:
    """With a message in it."""
    transport = open_transport(f"memory://{name}")
    transport.publish("orders", [Message("1", **fields)])
    return transport


# ---- Names -------------------------------------------------------------------------------------


def test_renamed(ledger: Ledger, url: str) -> None:
    """Retries and dead letters of a consumer that nobody works for are told while others work, with
    the name to give back; those of one that works, or of the only one, are not.
    """

    def fail(_: Message) -> None:
        raise ValueError("no")

    billing = Consumer(_queue("billing"), "orders").idempotent(ledger, "billing").backoff("1h")
    billing.catch(lambda *_: billing.stop()).consume(fail)
    ledger.recorder.tell()
    assert ops.problems(ledger) == []
    ledger.close()
    assert ops.problems(ledger) == []
    with closing(open_ledger(url)) as renamed:
        renamed.recorder.works_as("consumer", "invoices")
        renamed.recorder.tell()
        [problem] = ops.problems(renamed)
        now = renamed.now()
        several = Worker("x" * 32, "celery", "", "far", 7, "1", now, now, 0)
        renamed.operations.keep_worker(several, [])
        assert not ops.problems(renamed), "a worker of several consumers may be one of its"
        renamed.operations.end_worker(several.id)
        assert problem.startswith("No worker of the consumer 'billing' is running, while others")
        assert "1 of its messages wait" in problem
        assert ".idempotent(ledger, 'billing')" in problem
        complete(renamed, Key("invoices", "1"))
        renamed.close()
        assert ops.problems(renamed) == [problem]
        ledger.recorder.works_as("consumer", "billing")
        ledger.recorder.tell()
        assert ops.problems(renamed) == []
