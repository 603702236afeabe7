"""What went on, in a ledger that keeps it: rates, stories, workers, runs, and the audit."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from tests.conftest import OpenSqlite
from tests.records import granted
from tests.web.conftest import Reader, as_user, text

from oncely import Key, Ledger, open_ledger, ops
from oncely._util.chance import Process
from oncely.core.activity import AuditEntry, Run, Worker
from oncely.core.record import State
from oncely.stores.memory_store import MemoryStore
from oncely.stores.store import Tally
from oncely.testing import ManualClock
from oncely.web import contents, dashboard


@pytest.fixture
def ledger(sqlite_ledger_url: str) -> Iterator[Ledger]:
    """A ledger in SQL."""
    with closing(open_ledger(sqlite_ledger_url)) as opened:
        yield opened


def reader(ledger: Ledger) -> Reader:
    """Who may look, and change things."""
    return Reader(dashboard(ledger, auth=as_user()))


def test_rates(ledger: Ledger) -> None:
    """The overview has what came of messages in the last hour and day, and how long they took."""
    for number in range(3):
        ledger.complete(granted(ledger.claim(Key("billing", f"m{number}"))))
    ledger.fail(granted(ledger.claim(Key("billing", "bad"))), "no", final=True)
    ledger.recorder.tell()
    page = reader(ledger).get("/")
    assert "billing hour 3 0 1 1 0 0." in text(page)
    assert "billing day 3 0 1 1 0 0." in text(page)
    assert "<span>4</span><span>2</span><span>0</span>" in page
    assert '<rect class="handled"' in page
    assert '<rect class="failed"' in page


def test_hours_of_the_chart(ledger: Ledger) -> None:
    """Below the chart stand hours of the day, each below the column of that hour."""
    ledger.complete(granted(ledger.claim(Key("billing", "m1"))))
    ledger.recorder.tell()
    page = reader(ledger).get("/")
    hours = re.findall(r'<th scope="row"[^>]*><time datetime="[^"]*T(\d\d:\d\d)', page)
    words = re.findall(r'<text x="([\d.]+)%"[^>]*>(\d\d:\d\d)</text>', page)
    assert len(hours) in (24, 25)
    assert len(words) in (5, 6)
    assert [hours[round(float(at) / 100 * len(hours))] for at, _ in words] == [
        word for _, word in words
    ]


def test_attempts(ledger: Ledger) -> None:
    """The page of consumers has how long handling took, and how many attempts a message takes, of
    those that have ended; none where none has.
    """
    assert "Nothing was handled in the last day." in reader(ledger).get("/consumers")
    ledger.fail(granted(ledger.claim(Key("mailing", "m1"))), "later")
    for error in ("no", "no", None):
        claim = granted(ledger.claim(Key("billing", "m1")))
        if error is None:
            ledger.complete(claim)
        else:
            ledger.fail(claim, error)
    ledger.complete(granted(ledger.claim(Key("billing", "m2"))))
    ledger.recorder.tell()
    day = ops.activity(ledger).day
    assert (day["billing"].attempts, day["mailing"].attempts) == (2.0, None)
    page = text(reader(ledger).get("/consumers"))
    assert re.search(r"billing day 2 0 2 0 0 0\.\d+ s 0\.\d+ s 2\.00 ", page)
    assert re.search(r"The whole ledger takes [\d.]+ kB", page)
    assert "Of a policy the ledger keeps how long records are kept" in page


def test_estimates(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is estimated is marked so, and what is counted is not."""
    ledger.complete(granted(ledger.claim(Key("billing", "m1"))))
    ledger.fail(granted(ledger.claim(Key("billing", "m2"))), "no", final=True)
    assert "about" not in text(reader(ledger).get("/"))
    tallies = Ledger.tallies

    def estimated(self: Ledger, most: int | None = None) -> Mapping[tuple[str, State], Tally]:
        found = tallies(self, most)
        return {
            key: replace(tally, is_estimate=key[1] is State.COMPLETED)
            for key, tally in found.items()
        }

    monkeypatch.setattr(Ledger, "tallies", estimated)
    page = text(reader(ledger).get("/"))
    assert "completed about 1" in page
    assert "billing 1 failed, 1 completed 0 0 0 1 about 1" in page
    page = text(reader(ledger).get("/consumers"))
    assert re.search(r"completed 0 0 in doubt of billing 0 about 1 1 about 0", page)


def test_refresh_is_cheap(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the overview is looked at, the schema is compared once a minute, and a day of
    activity is read every ten seconds.
    """
    asked: list[str] = []
    for name in ("problems", "activity"):
        monkeypatch.setattr(ops, name, noted(asked, name, getattr(ops, name)))
    site = reader(ledger)
    for _ in range(3):
        site.get("/")
    assert asked == ["problems", "activity"]
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    site.get("/")
    assert asked == ["problems", "activity", "activity"]
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    site.get("/")
    assert asked[3:] == ["problems", "activity"]


def noted(asked: list[str], name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    """As `ask`, and each time its name is put on the list."""

    def noting(of: Ledger, **how: Any) -> Any:
        asked.append(name)
        return ask(of, **how)

    return noting


def test_workers(open_sqlite: OpenSqlite, clock: ManualClock) -> None:
    """Who is alive; one that was silent for half a minute is gone, and may have left claims: those
    that go on are counted.
    """
    ledger = Ledger(open_sqlite(clock))
    ledger.claim_many([Key("billing", "m1"), Key("billing", "m2")])
    gone = Worker("w1", "consumer", "billing", "shop-2", 4711, "1.0", 0.0, 0.0, 2, Process.number)
    ledger.recorder.is_silent = True
    ledger.operations.keep_worker(gone, [])
    assert "consumer billing shop-2 4711 alive 2" in text(reader(ledger).get("/workers"))
    clock.advance(31)
    page = text(reader(ledger).get("/workers"))
    assert re.search(r"shop-2 4711 gone since [-0-9: ]+ UTC, held 2 claims 2 ", page)
    clock.advance(1_000)
    ledger.operations.keep_worker(gone._replace(id="w2", pid=4712, number=None), [])
    ledger.operations.end_worker("w2")
    page = text(reader(ledger).get("/workers"))
    assert re.search(r"shop-2 4711 gone since [-0-9: ]+ UTC 0 ", page)
    assert re.search(r"shop-2 4712 stopped at [-0-9: ]+ UTC 0 ", page)


def test_a_worker_is_dead(open_sqlite: OpenSqlite, clock: ManualClock) -> None:
    """Of a process that is gone, somebody says that it is dead: its claims end, with a note, and
    what it held is in doubt. One that is alive again meanwhile is left alone.
    """
    ledger = Ledger(open_sqlite(clock))
    ledger.recorder.is_silent = True
    key = Key("billing", "m1")
    ledger.claim(key, "1h")
    gone = Worker("w1", "consumer", "billing", "shop-2", 4711, "1.0", 0.0, 0.0, 1, Process.number)
    ledger.operations.keep_worker(gone, [])
    operator = reader(ledger)
    assert 'name="worker"' not in operator.get("/workers")
    clock.advance(60)
    page = operator.get("/workers")
    asking = operator.send(page, "/workers/confirm", decision="dead", worker="shop-2:4711")
    assert "It is dead: end its claims: 1 worker" in text(asking)
    said = operator.send(asking, "/workers/change", why="its node is gone")
    assert "'m1' (billing): in doubt" in text(said)
    [record] = ops.select(ledger, ops.Selection(states=[ops.IN_DOUBT])).records
    assert record.key == key
    ledger.operations.keep_worker(gone, [])
    assert "shop-2:4711 is alive" in text(operator.send(asking, "/workers/change", why="again"))


def test_more_workers_than_a_page_can_show(
    open_sqlite: OpenSqlite, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a worker that is killed and started again all day, those last seen are shown."""
    monkeypatch.setattr(contents, "WORKERS", 3)
    ledger = Ledger(open_sqlite(clock))
    # Else this process might be one of them.
    ledger.recorder.is_silent = True
    now = ledger.now()
    for pid in range(100, 105):
        ledger.operations.keep_worker(
            Worker(f"w{pid}", "consumer", "billing", "shop-2", pid, "1.0", now, now, 1), []
        )
        clock.advance(1)
    clock.advance(60)
    page = text(reader(ledger).get("/workers"))
    assert "The 3 of 5 processes last seen" in page
    assert [pid for pid in range(100, 105) if f" {pid}" in page] == [102, 103, 104]


def test_runs(ledger: Ledger) -> None:
    """The equation of a run, and what was quarantined by reason; a killed one is told from one that
    runs by its worker.
    """
    totals = {
        "received": 11,
        "handled": 5,
        "duplicates": {"input": 1, "ledger": 2},
        "quarantined": {"missing_id": 3},
        "failed": 0,
        "in_doubt": 0,
        "waiting": 0,
    }
    ledger.operations.keep_run(Run("r1", "nightly", "billing", 1.0, 61.0, totals))
    ledger.operations.keep_run(Run("r2", "<script>", "billing", 2.0, None, {}, "no <b>disk</b>"))
    page = reader(ledger).get("/runs")
    assert "1 min 11 5 3 3 missing_id: 3 0 0 0" in text(page)
    assert "killed" in page
    assert "running" not in page
    ledger.recorder.tell()
    now = ledger.now()
    ledger.operations.keep_run(
        Run(f"{ledger.recorder.worker_id}.1", "now", "billing", now, None, {})
    )
    assert "running" in reader(ledger).get("/runs")
    assert "&lt;script&gt;" in page
    assert "no &lt;b&gt;disk" in page


def test_audit(ledger: Ledger) -> None:
    """Who changed what, when and why, a hundred at a time; each leads to its message."""
    for number in range(101):
        key = Key("billing", f"m{number}")
        ledger.fail(granted(ledger.claim(key)), "no", final=True)
        ops.reset(ledger, ops.find(ledger, key.message_id), by="anna", why="paid <by> hand")
    page = reader(ledger).get("/audit")
    assert "anna retried billing m100 1 0 paid" in text(page)
    assert "paid &lt;by&gt; hand" in page
    assert '<a href="/message?consumer=billing&amp;id=m100">' in page
    assert ">m0<" not in page
    assert ">m0<" in reader(ledger).get("/audit", before="2")
    assert "is not the number of an entry" in reader(ledger).get("/audit", 400, before="x")


def test_audit_begun(ledger: Ledger) -> None:
    """A change that was killed before its counts, and one that ended half-way, are shown as such,
    also on the page of the message.
    """
    ledger.fail(granted(ledger.claim(Key("billing", "m1"))), "no", final=True)
    store = ledger.operations
    begun = AuditEntry(0, 0.0, "anna", "reset", "billing", "m1", 40, None, None, "back")
    store.note(begun)
    store.note_counts(store.note(begun), 2, None)
    page = text(reader(ledger).get("/audit"))
    assert "m1 begun; how many were changed is not known (of 40) - back" in page
    assert "m1 begun; at least 2 changed (of 40) - back" in page
    page = text(reader(ledger).get("/message", consumer="billing", id="m1"))
    assert "by anna, why back, chosen 40, changed not known, refused not known" in page
    assert "by anna, why back, chosen 40, changed 2, refused not known" in page


def test_store_that_keeps_none() -> None:
    """In memory nothing is kept, which the pages say."""
    for path in ("/consumers", "/workers", "/runs", "/audit"):
        page = reader(Ledger(MemoryStore())).get(path)
        assert "This store keeps no activity, workers, runs or audit" in page
