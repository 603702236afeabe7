"""Transactions of a store: all or nothing, and the data that is kept with records."""

from dataclasses import replace
from typing import Any

import pytest
from tests.conformance.values import DISTINCT_IDS, JSON_VALUES
from tests.conformance.waiting_suite import HOLD_S, retry
from tests.records import (
    LEASE_S,
    PARENT,
    Doing,
    Swap,
    deferred,
    fresh,
    granted,
    ids_of,
    insert,
    key_of,
    record_of,
    swap,
)

from oncely.core.commands import Duplicate, Exhausted, Fail, Granted, Waiting, Written
from oncely.core.errors import FencedError, RefusedError
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, Record, State
from oncely.core.rules import PURGEABLE
from oncely.core.waiting import retries_of
from oncely.ledger.arguments import Write, to_claim
from oncely.ledger.ledger import Ledger
from oncely.stores.store import PutBack, Query, Transaction
from oncely.testing.tools import AdvancingClock


class TransactionStatements:
    """Transactions: all or nothing, and the data that is kept with records."""

    # ---- All or nothing --------------------------------------------------------------------------

    def test_all_is_stored(self, doing: Doing) -> None:
        """The writes of a transaction are there after it, and its result is returned."""

        def work(transaction: Transaction) -> str:
            insert(transaction, [fresh("1")])
            transaction.keep([deferred("m")])
            transaction.keep_step(PARENT, "step", 1)
            return "done"

        assert doing.store.transaction(work) == "done"
        assert len(doing.store.load([fresh("1").key]).records) == 1
        assert ids_of(doing.waiting([PARENT])) == ["m"]
        assert doing.ledger.steps(PARENT) == {"step": 1}

    def test_nothing_is_stored(self, doing: Doing) -> None:
        """An error of the work undoes everything, and is raised unchanged."""
        keys = [key_of(name) for name in ("old", "older", "changed", "other")]
        insert(doing, [fresh(key.message_id) for key in keys])
        doing.keep([deferred("sent"), deferred("refused", position=1)])
        [sent, refused] = doing.take(9, HOLD_S)
        before = sorted(doing.store.scan(Query()))

        def work(transaction: Transaction) -> None:
            insert(transaction, [fresh("new")])
            found = [transaction.load(keys).records[key] for key in keys]
            swap(transaction, [Swap(record, None) for record in found[:2]])
            swap(transaction, [Swap(record, _later(record)) for record in found[2:]])
            transaction.keep([deferred("more", position=2)])
            transaction.remove([sent])
            transaction.put_back([PutBack(refused, "no", None)])
            transaction.keep_step(PARENT, "step", 1)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            doing.store.transaction(work)
        assert sorted(doing.store.scan(Query())) == before
        assert doing.waiting([PARENT]) == [sent, refused]
        assert doing.ledger.steps(PARENT) == {}
        assert doing.backlog().set_aside == 0

    def test_own_writes_are_seen(self, doing: Doing) -> None:
        """A transaction reads its own writes."""

        def work(transaction: Transaction) -> None:
            record = fresh("1")
            assert insert(transaction, [record]) == {record.key}
            assert insert(transaction, [record._replace(version=9 << 24)]) == set()
            found = transaction.load([record.key]).records[record.key]
            assert swap(transaction, [Swap(found, _later(found))]) == {record.key}
            assert swap(transaction, [Swap(found, _later(found))]) == set()
            assert transaction.load([record.key]).records[record.key].version == found.version + 1

        doing.store.transaction(work)

    def test_swaps_of_many_inside(self, doing: Doing) -> None:
        """In one swap of many, records that lost do not keep the others from being written."""
        insert(doing, [fresh(str(n)) for n in range(10)])
        keys = [key_of(str(n)) for n in range(10)]

        def work(transaction: Transaction) -> set[Key]:
            found = transaction.load(keys).records
            swap(transaction, [Swap(found[keys[4]], _later(found[keys[4]]))])
            changes = [
                Swap(found[key], None if n % 2 else _later(found[key]))
                for n, key in enumerate(keys)
            ]
            return swap(transaction, changes)

        assert doing.store.transaction(work) == set(keys) - {keys[4]}
        assert set(doing.store.load(keys).records) == set(keys[::2])

    # ---- Steps -----------------------------------------------------------------------------------

    def test_steps(self, doing: Doing) -> None:
        """Steps are kept by name, for each message; the first result stays."""
        for n, name in enumerate(DISTINCT_IDS):
            doing.keep_step(PARENT, name, n)
            doing.keep_step(PARENT, name, "later")
        assert doing.steps_of([PARENT]) == {
            PARENT: {name: n for n, name in enumerate(DISTINCT_IDS)}
        }
        assert doing.steps_of([key_of("other"), Key("other", PARENT.message_id)]) == {}

    def test_steps_of_many(self, doing: Doing) -> None:
        """Those of many messages are found at once, each with its own."""
        keys = [key_of(id_) for id_ in DISTINCT_IDS]
        for n, key in enumerate(keys):
            doing.keep_step(key, "step", n)
            doing.keep_step(Key("other", key.message_id), "step", "of another consumer")
        found = doing.steps_of([*keys, key_of("without")])
        assert found == {key: {"step": n} for n, key in enumerate(keys)}
        assert doing.steps_of([]) == {}

    def test_results_of_steps(self, doing: Doing) -> None:
        """Results come back equal, and of the same type."""
        for n, value in enumerate((None, *JSON_VALUES)):
            doing.keep_step(PARENT, str(n), value)
            kept = doing.ledger.steps(PARENT)[str(n)]
            assert (kept, type(kept)) == (value, type(value))

    def test_forget(self, doing: Doing) -> None:
        """Forgetting a record removes its steps and deferred messages, and no other's."""
        for parent in (PARENT, key_of("other")):
            claim = granted(doing.ledger.claim(parent))
            doing.ledger.keep_step(claim, "step", 1)
            doing.ledger.handled(claim, None, [deferred("m", parent=parent)])
        doing.ledger.forget(PARENT)
        assert (doing.ledger.steps(PARENT), doing.ledger.mailbox.deferred(PARENT)) == ({}, [])
        assert doing.ledger.steps(key_of("other")) == {"step": 1}
        assert ids_of(doing.ledger.mailbox.deferred(key_of("other"))) == ["m"]

    # ---- Purging ---------------------------------------------------------------------------------

    def test_purge_takes_steps(self, doing: Doing, clock: AdvancingClock) -> None:
        """A record is purged with its steps; those of others stay."""
        for name in ("old", "new"):
            claim = granted(doing.ledger.claim(key_of(name)))
            doing.ledger.keep_step(claim, "step", 1)
            doing.ledger.complete(claim)
            clock.advance(100)
        # The batch is full: this purge does not look for steps.
        assert doing.store.purge(Query(older_than_s=150, limit=1), PURGEABLE) == 1
        assert doing.steps_of([key_of("old"), key_of("new")]) == {key_of("new"): {"step": 1}}

    def test_purge_takes_steps_without_a_record(self, doing: Doing, clock: AdvancingClock) -> None:
        """Old steps of a message that was released and never redelivered are purged, too."""
        for name in ("old", "new"):
            claim = granted(doing.ledger.claim(key_of(name)))
            doing.ledger.keep_step(claim, "step", 1)
            doing.ledger.release(claim)
            clock.advance(100)
        running = granted(doing.ledger.claim(key_of("running"), "1h"))
        doing.ledger.keep_step(running, "step", 1)
        assert doing.ledger.purge("150s", consumer="another") == 0
        assert doing.ledger.steps(key_of("old")) == {"step": 1}
        assert doing.ledger.purge("150s") == 0
        assert doing.steps_of([key_of("old"), key_of("new")]) == {key_of("new"): {"step": 1}}
        clock.advance(1_000)
        assert doing.ledger.purge("150s") == 0
        kept = {key_of("running"): {"step": 1}}
        assert doing.steps_of([key_of("new"), *kept]) == kept

    def test_purge_leaves_what_waits(self, doing: Doing, clock: AdvancingClock) -> None:
        """A record with deferred messages that wait, or are set aside, is not purged."""
        for name in ("waits", "aside", "sent"):
            claim = granted(doing.ledger.claim(key_of(name)))
            doing.ledger.complete(claim)
            doing.keep([deferred("m", parent=key_of(name))])
        [aside] = doing.take(1, HOLD_S, [key_of("aside")])
        doing.put_back([PutBack(aside, "no", None)])
        doing.remove(doing.take(1, HOLD_S, [key_of("sent")]))
        clock.advance(100)
        assert doing.ledger.purge("50s") == 1
        assert doing.ledger.find(key_of("sent")) is None
        doing.remove(doing.waiting([key_of("waits"), key_of("aside")]))
        assert doing.ledger.purge("50s") == 2


class TransactionRules:
    """What a ledger stores together, and what operators decide."""

    def test_happened(self, doing: Doing, clock: AdvancingClock) -> None:
        """What somebody says has happened is completed, the former holder is fenced, and its retry
        waits no more; what else was set aside under its id stays, and so do others.
        """
        ledger, other = doing.ledger, deferred("parent", "other content")
        claim = granted(ledger.claim(PARENT, "60s"))
        aside = replace(retry("parent"), name=other.name, is_set_aside=True)
        doing.keep([retry("parent"), aside, retry("b")])
        with pytest.raises(RefusedError, match="is processing"):
            ledger.happened(PARENT)
        clock.advance(61)
        ledger.happened(PARENT, by="ann", why="it is on the bill")
        record = record_of(ledger, PARENT)
        assert (record.state, record.lease_until) == (State.COMPLETED, None)
        note = (record.metadata or {})["happened"]
        assert (note["by"], note["why"]) == ("ann", "it is on the bill")
        with pytest.raises(FencedError):
            ledger.complete(claim)
        assert isinstance(ledger.claim(PARENT), Duplicate)
        [left] = ledger.waiting("billing")
        assert left.id == "b"
        [letter] = ledger.dead("billing")
        assert letter.key == PARENT
        ledger.happened(PARENT, by="ann", why="it is on the bill")
        with pytest.raises(RefusedError, match="is completed"):
            ledger.happened(PARENT, by="bob")

    def test_reset_of_what_waits(self, doing: Doing) -> None:
        """What waits for its retry is due at once, and runs: a delivery meanwhile is another copy.
        What was never tried, and waits, is due, too. What a worker has begun is refused.
        """
        ledger, queue = doing.ledger, retries_of("billing")
        _fail_to_wait(ledger)
        assert isinstance(ledger.claim(PARENT), Waiting)
        assert doing.take(1, HOLD_S, queue=queue) == []
        doing.keep([replace(retry("b"), delay_s=600.0)])
        for key in (PARENT, key_of("b")):
            ledger.reset(key)
        assert isinstance(ledger.claim(PARENT), Waiting)
        assert [each.id for each in doing.take(9, HOLD_S, queue=queue)] == ["parent", "b"]
        with pytest.raises(RefusedError, match="is not in the ledger"):
            ledger.reset(key_of("b"))
        assert _claim_taken(ledger).attempts == 1
        with pytest.raises(
            RefusedError, match=r"is processing \(lease .*: a worker has it in hand"
        ):
            ledger.discard(PARENT)
        with pytest.raises(RefusedError, match="does not wait for a retry"):
            ledger.discard(key_of("other"))
        assert not any(tally.for_sender for tally in ledger.tallies().values())

    def test_discard(self, doing: Doing) -> None:
        """What waits for its retry becomes a dead letter, with who and why; it does not run before
        that is retried. What was never tried, and waits, becomes one, too.
        """
        ledger = doing.ledger
        _fail_to_wait(ledger)
        doing.keep([retry("b")])
        for key in (PARENT, key_of("b")):
            ledger.discard(key, by="ann", why="withdrawn")
        one, two = ledger.dead("billing")
        assert (one.key, one.reason) == (PARENT, "discarded by ann: withdrawn")
        assert (two.key, two.reason) == (key_of("b"), "discarded by ann: withdrawn")
        assert isinstance(ledger.claim(PARENT), Exhausted)
        assert [*ledger.waiting("billing")] == []
        ledger.discard(PARENT, by="ann", why="withdrawn")
        ledger.retry_dead([one.id, two.id])
        assert [each.id for each in doing.take(9, HOLD_S, queue=retries_of("billing"))] == [
            "parent",
            "b",
        ]
        assert _claim_taken(ledger).attempts == 1


def _later(record: Record, **fields: Any) -> Record:
    return record._replace(version=record.version + 1, lease_until=LEASE_S, **fields)


def _fail_to_wait(ledger: Ledger) -> None:
    """A message has failed, and waits ten minutes for its retry."""
    claim = granted(ledger.claim(PARENT))
    waits = replace(retry("parent"), delay_s=600.0, error="no")
    [outcome] = ledger.write_all([Write(Fail(claim, "no", retry_s=600.0), [waits])])
    assert isinstance(outcome, Written)


def _claim_taken(ledger: Ledger) -> Claim:
    """Ask for what waited in the ledger, and was taken there."""
    outcome = ledger._settle_one(to_claim([PARENT], None, Policy())[0]._replace(is_taken=True))
    assert isinstance(outcome, Granted)
    return outcome.claim
