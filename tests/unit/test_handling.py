"""Handling: many turns at once, of which some meet what the others do not."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.meddling import MeddlingStore
from tests.records import granted
from tests.unit.conftest import Outage, Queue, Sql

from oncely.consumer import Consumer
from oncely.core import rules
from oncely.core.cases import Case
from oncely.core.errors import KeysLocked, StoreUnavailable
from oncely.core.message import Message
from oncely.core.policy import Finding, Policy
from oncely.core.record import Key, Record, State
from oncely.core.verdicts import Ack, Phase
from oncely.engine.inline_calls import InlineCalls, run_inline
from oncely.ledger import Ledger
from oncely.lifecycle import transacting
from oncely.lifecycle.handling import Handling
from oncely.lifecycle.held_message import Untracked
from oncely.lifecycle.turn import Asked, Kept, Turn
from oncely.stores.memory_store import MemoryStore
from oncely.testing import ManualClock

LEASE = timedelta(minutes=1)


def turns_of(*ids: str) -> list[Turn]:
    """A turn for each."""
    return [Turn(Asked(message_id)) for message_id in ids]


def begin(handling: Handling, turns: Sequence[Turn]) -> None:
    """Ask for all of them."""
    run_inline(handling.begin(InlineCalls(handling.ledger), turns))


def key_of(message_id: str) -> Key:
    """What the ledger knows a message by."""
    return Key("billing", message_id)


def leave_in_doubt(ledger: Ledger, clock: ManualClock, *ids: str) -> None:
    """Claims of these have run out."""
    for message_id in ids:
        granted(ledger.claim(key_of(message_id), LEASE))
    clock.advance(61)


# ---- A probe -----------------------------------------------------------------------------------


def test_outage_after_a_probe(ledger: Ledger, clock: ManualClock, outage: Outage) -> None:
    """What the ledger has answered before holds: no claim is forgotten, no duplicate runs."""
    leave_in_doubt(ledger, clock, "doubt")
    ledger.complete(granted(ledger.claim(key_of("done"))))

    def probe(_: Message) -> Finding:
        outage.begin()
        return "not_happened"

    handling = Handling.under(ledger, "billing", Policy(on_in_doubt=probe, on_outage="run"))
    new, done, doubt = turns = turns_of("new", "done", "doubt")
    begin(handling, turns)
    outage.end()
    assert new.held is not None
    assert isinstance(done.begun, Kept)
    assert isinstance(doubt.begun, Untracked)
    handling.heartbeat.let_go(new.held.claim)


def test_many_in_doubt(
    ledger: Ledger, clock: ManualClock, outage: Outage, meddling: MeddlingStore
) -> None:
    """Each is probed once and none is refused, also where the store goes away in between; it is
    asked for all together.
    """
    ids = [str(number) for number in range(50)]
    leave_in_doubt(ledger, clock, *ids)
    probed: list[str] = []

    def probe(message: Message) -> Finding:
        probed.append(message.id)
        if len(probed) == 10:
            outage.begin()
        return "not_happened"

    handling = Handling.under(ledger, "billing", Policy(on_in_doubt=probe))
    turns = turns_of(*ids)
    with pytest.raises(StoreUnavailable):
        begin(handling, turns)
    outage.end()
    meddling.calls.clear()
    begin(handling, turns)
    assert [turn.held is not None for turn in turns] == [True] * 50
    assert probed == ids
    assert len(meddling.calls) < 10
    handling.heartbeat.let_go_many([turn.held.claim for turn in turns if turn.held])


# ---- What is locked ----------------------------------------------------------------------------


class Locking(MeddlingStore):
    """A store in which somebody holds a key for as many swaps as is said."""

    held: Key
    left = 0
    swapped: list[set[Key]]

    def update(self, case: Case) -> set[Key]:
        self.swapped.append({row[0] for row in case.rows})
        free = [row for row in case.rows if row[0] != self.held or not self.left]
        written: set[Key] = super().update(case._replace(rows=free))
        if len(free) < len(case.rows):
            self.left -= 1
            raise KeysLocked("locked", {self.held}, written)
        return written


@pytest.mark.usefixtures("hurried")
def test_one_locked_key(clock: ManualClock) -> None:
    """Of a window all others are stored at once, and are not said again."""
    store = Locking(MemoryStore(clock))
    store.swapped, store.held = [], key_of("250")
    ledger = Ledger(store)
    handling = Handling.under(ledger, "billing", Policy())
    turns = turns_of(*map(str, range(500)))
    begin(handling, turns)
    for turn in turns:
        turn.phase = Phase.CALLED
    store.swapped.clear()
    store.left = 5
    run_inline(handling.end(InlineCalls(ledger), turns))
    assert ledger.counts() == {("billing", State.COMPLETED): 500}
    assert {turn.phase for turn in turns} == {Phase.STORED}
    assert sorted(map(len, store.swapped)) == [1] * 5 + [500]


# ---- Transactions ------------------------------------------------------------------------------


def test_another_database_is_locked(
    queue: Queue, sql: Sql, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A handler that always finds another database locked has failed, and spends its tries."""
    monkeypatch.setattr(transacting, "_TRIES", 3)
    monkeypatch.setattr(rules, "AGAIN_S", 0.01)
    runs: list[str] = []

    def handle(message: Message, _: Any) -> None:
        runs.append(message.id)
        if len(runs) > 20:
            pytest.exit("it runs for ever")
        with closing(sqlite3.connect(tmp_path / "other.db", timeout=0)) as other:
            other.execute("BEGIN IMMEDIATE")

    queue.put("1")
    consumer = Consumer(queue, "in").idempotent(sql.ledger, "billing").tries(2).backoff(0.01)
    with closing(sqlite3.connect(tmp_path / "other.db")) as owner:
        owner.execute("BEGIN IMMEDIATE")
        report = consumer.transactional(sql.engine).consume(handle, drain=True)
    assert (report.retried, report.failed, len(runs)) == (1, 1, 6)
    record = sql.record("1")
    assert isinstance(record, Record)
    assert (record.exhausted, record.attempts) == (True, 2)
    assert "database is locked" in queue.put_aside()["1"]
    assert Ack() not in queue.verdicts
