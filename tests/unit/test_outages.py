"""An outage is logged when it begins and when it ends, by whatever meets it again and again."""

import itertools
import logging
import sqlite3
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event
from tests.http.drivers import Shop, drive_by
from tests.logs import events_in
from tests.meddling import MeddlingStore
from tests.unit.conftest import Queue, Sql, failing, nothing

from oncely import http
from oncely.consumer import Consumer
from oncely.core import turn
from oncely.core.errors import StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Policy
from oncely.ledger.driver import run_inline
from oncely.ledger.ledger import Ledger
from oncely.lifecycle.lifecycle import Lifecycle
from oncely.once import once
from oncely.outbox import Relay


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "oncely")


AWAY = StoreUnavailable("gone")


def test_an_end_that_waits(
    ledger: Ledger, meddling: MeddlingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Storing the end of a handler is tried many times."""

    @once(ledger, consumer="billing", key=lambda message_id: message_id)
    def handle(_: str) -> None:
        meddling.meddle = failing(3, AWAY, nothing)

    handle("1")
    assert events_in(caplog) == ["store_unavailable", "store_available"]


def test_the_store_of_a_consumer(
    queue: Queue, ledger: Ledger, meddling: MeddlingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Its claims, and the ends of its handlers, meet one outage."""
    queue.put("1", "2")
    meddling.meddle = failing(3, AWAY, nothing)

    def handle(_: Message) -> None:
        meddling.meddle = failing(3, AWAY, nothing)

    assert Consumer(queue, "in").idempotent(ledger, "billing").consume(handle, drain=True).handled
    events = events_in(caplog)
    assert {*events} == {"store_unavailable", "store_available"}
    assert all(one != other for one, other in itertools.pairwise(events))
    assert {vars(each)["queue"] for each in caplog.records} == {"in"}


def test_a_relay(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries again, ever more slowly."""
    monkeypatch.setattr("oncely.outbox._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(Ledger, "scan", failing(3, AWAY, Ledger.scan))
    stop = threading.Event()
    seen = iter([True] * 4)
    relay = Relay(ledger, Queue(), poll=0.001)
    relay.run(stop, lambda _: None if next(seen, None) else stop.set())
    assert events_in(caplog) == ["relay_stalled", "relay_recovered"]


def test_transactions(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A message whose transaction cannot begin, or is to be committed to a full disk, waits."""
    monkeypatch.setattr(turn, "AGAIN_S", 0.01)
    queue.put("1")
    source = SimpleNamespace(begin=failing(3, AWAY, sql.engine.begin))
    full = sqlite3.OperationalError("database or disk is full")
    event.listen(sql.engine, "commit", failing(3, full, nothing))
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").transactional(source)
    assert consumer.tries(1).consume(lambda *_: None, drain=True).handled == 1
    assert events_in(caplog) == ["store_unavailable", "store_available"]


def test_failures_that_cannot_be_recorded(
    ledger: Ledger, meddling: MeddlingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler's own error is told each time; an outage that has undone its transaction, once."""
    meddling.meddle = failing(4, AWAY, nothing)
    under = Lifecycle.under(ledger, "billing", Policy())
    for error in (AWAY, AWAY, ValueError("no"), ValueError("no")):
        failed = turn.Turn("1", None, Message("1"))
        run_inline(under.record_failure(under.sync_driver, failed, error))
    assert events_in(caplog) == ["store_unavailable", "recording_failed", "recording_failed"]


def test_requests(
    ledger: Ledger, meddling: MeddlingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Each request with a key is answered with 503 while the store is away."""
    site = drive_by("wsgi", ledger, Shop())()
    meddling.meddle = failing(1_000, AWAY, nothing)
    statuses = [site(f"key-{n}").status for n in range(3)]
    meddling.meddle = nothing
    statuses += [site(f"key-{n}").status for n in range(3)]
    assert statuses == [503] * 3 + [201] * 3
    assert events_in(caplog) == ["request_refused", "requests_accepted"]
    assert "key-0" in vars(caplog.records[0])["message_id"]


def test_webhooks(
    ledger: Ledger, meddling: MeddlingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Each delivery is answered with 503 while the store is away."""
    verify: Any = http.Verifier("any", nothing, lambda fields, _: fields["id"], lambda *_: "")
    hook = http.webhook(ledger, queue="hooks", verify=verify, timeout="60s")
    meddling.meddle = failing(1_000, AWAY, nothing)
    statuses = [hook.receive("POST", {"id": f"d-{n}"}, b"{}").status for n in range(3)]
    meddling.meddle = nothing
    statuses += [hook.receive("POST", {"id": f"d-{n}"}, b"{}").status for n in range(3)]
    assert statuses == [503] * 3 + [202] * 3
    assert events_in(caplog) == ["delivery_not_stored", "deliveries_stored"]
    assert vars(caplog.records[0])["message_id"] == "d-0"
