"""Forgetting on purpose: nothing of an erased message is left anywhere in the ledger."""

import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import MetaData
from tests.conformance.conftest import url_of
from tests.integration.drivers import engine_on
from tests.integration.test_auditing import aside
from tests.logs import events_in
from tests.records import deferred, granted, record_of
from tests.turns import in_turn

from oncely import ops
from oncely.core.errors import ConfigError, RefusedError
from oncely.core.message import Message
from oncely.core.record import Key
from oncely.core.waiting import ERASED, Erased, WaitingMessage, retries_of
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.stores.sql import SqlStore
from oncely.stores.sql.engines import server_engine, sqlite_engine
from oncely.testing import ManualClock

ID, BODY = "anna-4711", b"lives at 7 Elm Street"
KEY = Key("billing", ID)
WHOLE = Erased(records=1, steps=1, waiting=3, dead_letters=1, unsent=2, audit=2)
DAY_S = 86_400.0
_COUNTS = ("message_workers", "message_activity")
"""The tables in which a process writes now and then what it has counted."""


@pytest.fixture(params=["sqlite", *in_turn("erasing", ["postgresql", "mysql"])])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A ledger with all that can be kept of one message, and with another message."""
    url = url_of(request.param, request, tmp_path)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        text = BODY.decode()
        for key in (KEY, Key("billing", "other")):
            claim = granted(ledger.claim(key, metadata={"at": text} if key == KEY else None))
            ledger.keep_step(claim, "charge", {"at": text} if key == KEY else 1)
            ledger.fail(claim, f"{text} is unknown" if key == KEY else "no", final=True)
        message, other = Message(ID, BODY, headers={"at": text}), Message(ID, b"other " + BODY)
        queue, queued = retries_of("billing"), WaitingMessage.queued("orders", [message, other])
        unsent = [
            deferred("1", body=BODY, parent=KEY),
            WaitingMessage.unparented("m", message, "n"),
        ]
        ledger.mailbox.keep([*unsent, *queued, aside("other")])
        records = [record_of(ledger, KEY), record_of(ledger, Key("billing", "other"))]
        ops.reset(ledger, records[:1], by="ann", why=f"{ID} complained")
        ops.reset(ledger, records, by="ann")
        waits = WaitingMessage(ID, "", message, KEY, queue=queue, name=aside(ID).name, delay_s=60.0)
        dead = WaitingMessage(ID, "", other, KEY, queue=queue, is_set_aside=True, reason=text)
        ledger.mailbox.keep([waits, dead])
    return url


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """That ledger."""
    with closing(open_ledger(url)) as opened:
        yield opened


def content(url: str, but: Collection[str] = ()) -> bytes:
    """Every value in every table but these."""
    engine, tables = engine_on(url), MetaData()
    tables.reflect(engine)
    chosen = [table for name, table in sorted(tables.tables.items()) if name not in but]
    with engine.connect() as connection:
        found = [value for t in chosen for row in connection.execute(t.select()) for value in row]
    engine.dispose()
    return b"\n".join(v if isinstance(v, bytes) else repr(v).encode() for v in found)


def quoted(kept: bytes) -> list[bytes]:
    """What of the message stands there."""
    return [each for each in (ID.encode(), BODY) if each in kept]


def test_nothing_is_left(url: str, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the id nor the content stands in any column, nor in the bytes of a file; the other
    message is as it was. What was found is said, and noted without the id. Once more finds nothing.
    """
    assert quoted(content(url)) == [ID.encode(), BODY]
    with caplog.at_level("INFO", "oncely"):
        assert ops.erase(ledger, KEY, by="bob", why=f"{ID} asked by mail") == (WHOLE, None)
    assert events_in(caplog) == ["erased"]
    assert quoted(content(url) + caplog.text.encode()) == []
    other = Key("billing", "other")
    assert (record_of(ledger, other).error, ledger.steps(other)) == ("no", {"charge": 1})
    assert len(ledger.mailbox.of(other)) == 1
    entry, *older = ledger.operations.audit()
    assert entry[2:] == ("bob", "erased", "billing", ERASED, None, 10, 0, f"{ERASED} asked by mail")
    assert {each.message_id for each in older} == {ERASED}
    assert older[-1].why == f"{ERASED} complained"
    assert ops.erase(ledger, KEY, by="bob") == (Erased(), None)
    ledger.close()
    if url.startswith("sqlite"):
        file = Path(url.removeprefix("sqlite:///"))
        assert not quoted(b"".join(each.read_bytes() for each in file.parent.glob(f"{file.name}*")))


@pytest.mark.parametrize("queue", [retries_of("billing"), "queue/orders", "send"])
def test_in_hand(url: str, ledger: Ledger, queue: str) -> None:
    """A copy that a worker or a relay has taken: it is refused, and nothing is removed."""
    ledger.reset(KEY)  # The retry is due at once.
    assert ledger.mailbox.take(9, "1h", queue=queue)
    before = content(url, _COUNTS)
    with pytest.raises(RefusedError, match="a worker or a relay has a copy of it in hand"):
        ledger.erase(KEY)
    assert content(url, _COUNTS) == before


def test_many_at_once(ledger: Ledger) -> None:
    """Each thing is found by one of them; what another consumer has under the same id stays."""
    theirs = Key("mailing", ID)
    ledger.complete(granted(ledger.claim(theirs)), {"to": "anna"})
    ledger.mailbox.keep([aside(ID, "mailing")])
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: ledger.erase(KEY), range(4))]
    assert [sum(each) for each in zip(*found, strict=True)] == [*WHOLE]
    assert record_of(ledger, theirs).result == {"to": "anna"}
    assert len(ledger.mailbox.dead_of(theirs)) == 1


_KILLED = """
import os, signal, sys
from oncely import ops
from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger
from oncely.stores.sql.sql_transaction import SqlTransaction

SqlTransaction.rename_in_audit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ops.erase(open_ledger(sys.argv[1]), Key("billing", sys.argv[2]), by="ann")
"""


def test_killed_in_the_middle(url: str, ledger: Ledger) -> None:
    """A process is killed when all is removed and not committed: all is there, and the entry says
    that it has begun. Done again, it finds everything.
    """
    killed = subprocess.run([sys.executable, "-c", _KILLED, url, ID], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    [entry] = ledger.operations.audit(1)
    assert (entry.action, entry.message_id, entry.changed) == ("erased", ERASED, None)
    assert ops.erase(ledger, KEY, by="ann") == (WHOLE, None)


@pytest.mark.parametrize("kind", ["memory", *in_turn("live", ["sqlite", "postgresql", "redis"])])
def test_a_live_claim(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """It is refused, with the time until when; when it has ended, the record is erased, and noted
    as refused before that. An unknown consumer is a mistake.
    """
    url = "memory://" if kind == "memory" else url_of(kind, request, tmp_path)
    with closing(open_ledger(url)) as ledger:
        ledger.migrate()
        claim = granted(ledger.claim(KEY, "1h"))
        with pytest.raises(RefusedError, match=r"lease until .* UTC\): a record with a live claim"):
            ops.erase(ledger, KEY, by="ann")
        ledger.complete(claim, {"to": "anna"})
        assert ops.erase(ledger, KEY, by="ann")[0] == Erased(records=1)
        with pytest.raises(ConfigError, match="no messages or records of consumer 'biling'"):
            ops.erase(ledger, Key("biling", ID), by="ann")
        counts = [(each.changed, each.refused) for each in ledger.operations.audit()]
        assert counts in ([], [(0, 0), (1, 0), (0, 1)])


@pytest.mark.parametrize("kind", ["sqlite", *in_turn("old", ["postgresql", "mysql"])])
def test_what_is_old(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Dead letters and the audit are kept for 90 days. A record stays as long as its dead letter,
    and goes with it. A dry run says the same before, and changes nothing.
    """
    clock, url = ManualClock(), url_of(kind, request, tmp_path)
    engine = sqlite_engine(tmp_path / "ledger.db") if kind == "sqlite" else server_engine(url)
    with closing(Ledger(SqlStore(engine, clock=clock))) as ledger:
        ledger.migrate()
        for id_, days in (("old", 60.0), ("young", 31.0)):
            ledger.fail(granted(ledger.claim(Key("billing", id_))), "no", final=True)
            ledger.mailbox.keep([aside(id_), deferred(id_, parent=Key("billing", f"to-{id_}"))])
            ops.retry(ledger, [Key("billing", "unknown")], by=id_)
            clock.advance(days * DAY_S)
        before = content(url, _COUNTS)
        told = ops.purge(ledger, dry_run=True, by="bob")
        assert content(url, _COUNTS) == before
        assert told.before == {"billing": ledger.now() - 30 * DAY_S}
        done = ops.purge(ledger, by="bob")
        assert done == told
        assert (done.counts, done.dead_letters, done.audit) == ({"billing": 1}, {"billing": 1}, 1)
        assert [letter.key.message_id for letter in ledger.dead()] == ["young"]
        assert ledger.mailbox.backlog().waiting == 2
        noted = [(each.by, each.changed) for each in ledger.operations.audit()]
        assert noted == [("bob", 3), ("young", 0)]
