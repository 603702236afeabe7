"""Many at once at one store: its locks and its transactions, and nothing of the rules."""

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from tests.conformance.record_suite import failed, inserted, stored
from tests.conformance.waiting_suite import HOLD_S, RETRIES, retry
from tests.records import (
    LEASE_S,
    PARENT,
    Doing,
    Swap,
    deferred,
    fresh,
    granted,
    key_of,
    record_of,
    swap,
)
from tests.records import insert as insert_in

from oncely.core.commands import Busy, Duplicate, Granted, TooOld
from oncely.core.errors import RefusedError
from oncely.core.record import Key, Record, State
from oncely.core.rules import PURGEABLE
from oncely.ledger.ledger import Ledger
from oncely.stores.store import Query, Store, Transaction
from oncely.testing.tools import AdvancingClock, at_once

_RACERS = 20
_TRANSACTIONS = 8
_ROUNDS = 3
_LETTERS = 60
KEY = Key("billing", "abc-123")


class RecordRaces:
    """Races for records, by single statements."""

    def test_first_inserts_race(self, store: Store) -> None:
        """Twenty racing first inserts of one key: exactly one wins, and it is what is stored."""
        records = [fresh("1", version=n << 24) for n in range(_RACERS)]
        written = at_once(_RACERS, lambda n: insert_in(store, [records[n]]))
        [winner] = [n for n in range(_RACERS) if written[n]]
        assert stored(store, records[0].key).version == records[winner].version

    def test_batches_of_inserts_race(self, store: Store) -> None:
        """Racing batches over the same keys, each in another order: each key is written once."""
        keys = [fresh(str(n)).key for n in range(50)]

        def insert(racer: int) -> set[Key]:
            order = keys[racer:] + keys[:racer]
            return insert_in(store, [fresh(key.message_id, version=racer << 24) for key in order])

        written = at_once(_RACERS, insert)
        assert sorted(key for keys in written for key in keys) == sorted(keys)

    def test_swaps_race(self, store: Store) -> None:
        """Twenty racing swaps of one record: exactly one wins, and it is what is stored."""
        old = inserted(store, "1")
        news = [old._replace(fence=n, version=old.version + 1) for n in range(_RACERS)]
        written = at_once(_RACERS, lambda n: swap(store, [Swap(old, news[n])]))
        [winner] = [n for n in range(_RACERS) if written[n]]
        assert stored(store, old.key).fence == winner

    def test_removal_and_swap_race(self, store: Store) -> None:
        """Of racing removals and swaps of one record exactly one wins."""
        old = inserted(store, "1")
        new = old._replace(fence=2, version=old.version + 1)
        written = at_once(_RACERS, lambda n: swap(store, [Swap(old, new if n % 2 else None)]))
        assert sum(len(keys) for keys in written) == 1

    def test_purges_race(self, store: Store, clock: AdvancingClock) -> None:
        """Several cleaners at once remove every record once between them."""
        for n in range(40):
            failed(store, str(n))
        clock.advance(100)
        query = Query(older_than_s=50, limit=3)
        assert sum(at_once(_RACERS, lambda _: store.purge(query, [State.FAILED]))) == 40

    def test_migrate_again(self, store: Store) -> None:
        """To migrate again, and from many threads at once, changes nothing."""
        record = inserted(store, "1")
        at_once(_RACERS, lambda _: store.migrate())
        assert stored(store, record.key) == record

    def test_claims_race(self, ledger: Ledger) -> None:
        """Twenty racing claims of one key: exactly one is granted, the others are busy."""
        outcomes = at_once(_RACERS, lambda _: ledger.claim(KEY))
        assert Counter(map(type, outcomes)) == {Busy: _RACERS - 1, Granted: 1}

    def test_claims_race_for_what_ran_out(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """Twenty racing claims after a lease ran out: exactly one is granted, one fence later."""
        granted(ledger.claim(KEY, "60s"))
        clock.advance(61)
        outcomes = at_once(_RACERS, lambda _: ledger.claim(KEY))
        assert Counter(map(type, outcomes)) == {Busy: _RACERS - 1, Granted: 1}
        assert record_of(ledger, KEY).fence == 2

    def test_operators_race_for_records(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """Of two who decide about each record in doubt, in opposite ways, one is told that it is
        done, and it is so.
        """
        keys = [Key("billing", str(n)) for n in range(_LETTERS)]
        ledger.claim_many(keys, "60s")
        clock.advance(61)
        found = {key: ledger.find(key) for key in keys}
        done: list[list[Key]] = [[], []]

        def decide(racer: int) -> None:
            for key in keys:
                decided = ledger.reset if racer else ledger.happened
                record = found[key]
                with suppress(RefusedError):
                    decided(key, fence=record and record.fence, by=str(racer))
                    done[racer].append(key)

        at_once(2, decide)
        state_of = {key: stored(ledger._store, key).state for key in keys}
        assert [key for key in keys if state_of[key] is State.COMPLETED] == done[0]
        assert [key for key in keys if state_of[key] is State.FAILED] == done[1]
        assert len(done[0]) + len(done[1]) == len(keys)

    def test_purges_race_claims(self, store: Store, clock: AdvancingClock) -> None:
        """While a completed message is purged, racing claims of it are never granted."""
        for n in range(_ROUNDS):
            key = Key("billing", str(n))
            ledgers = [Ledger(store) for _ in range(6)]
            sent_at = ledgers[0].now()
            ledgers[0].complete(granted(ledgers[0].claim(key, sent_at=sent_at)))
            clock.advance(100)
            purged: list[int] = []

            def race(
                racer: int,
                ledgers: list[Ledger] = ledgers,
                key: Key = key,
                sent_at: float = sent_at,
                purged: list[int] = purged,
            ) -> set[type]:
                if racer == 0:
                    purged.append(ledgers[0].purge("50s"))
                    return set()
                asked: set[type] = set()
                while not purged and TooOld not in asked:
                    asked.add(type(ledgers[racer].claim(key, sent_at=sent_at)))
                return asked | {type(ledgers[racer].claim(key, sent_at=sent_at))}

            for answers in at_once(len(ledgers), race)[1:]:
                assert answers <= {Duplicate, TooOld}
            for ledger in ledgers:
                ledger.close()


class TransactionRaces:
    """Races of transactions, for records and for what waits."""

    def test_load_holds_what_it_finds(self, doing: Doing) -> None:
        """Records loaded inside do not change until the end: of many at once none loses."""
        insert_in(doing, [fresh("1")])

        def count(transaction: Transaction) -> set[Key]:
            found = transaction.load([key_of("1")]).records[key_of("1")]
            return swap(transaction, [Swap(found, _later(found, duplicates=found.duplicates + 1))])

        written = at_once(_TRANSACTIONS, lambda _: doing.store.transaction(count))
        assert written == [{key_of("1")}] * _TRANSACTIONS
        assert doing.store.load([key_of("1")]).records[key_of("1")].duplicates == _TRANSACTIONS

    def test_inserts_inside_race(self, doing: Doing) -> None:
        """An insert waits for another writer of the key, and sees its result."""

        def insert(n: int) -> tuple[bool, int]:
            def work(transaction: Transaction) -> tuple[bool, int]:
                written = insert_in(transaction, [fresh("1", version=n << 24)])
                return bool(written), transaction.load([key_of("1")]).records[
                    key_of("1")
                ].version >> 24

            return doing.store.transaction(work)

        answers = at_once(_TRANSACTIONS, insert)
        [winner] = [n for n in range(_TRANSACTIONS) if answers[n][0]]
        assert {version for _, version in answers} == {winner}

    def test_transactions_that_wait_for_each_other(self, doing: Doing) -> None:
        """Two transactions that need the same records in opposite orders both end."""
        keys = [key_of("1"), key_of("2")]
        insert_in(doing, [fresh("1"), fresh("2")])
        both_have_one = threading.Barrier(2)

        def count(order: Sequence[Key]) -> None:
            def work(transaction: Transaction) -> None:
                for key in order:
                    found = transaction.load([key]).records[key]
                    swap(transaction, [Swap(found, _later(found, duplicates=found.duplicates + 1))])
                    # Where one transaction waits for the other to end, this breaks.
                    with suppress(threading.BrokenBarrierError):
                        both_have_one.wait(0.5)

            doing.store.transaction(work)

        at_once(2, lambda n: count(keys[:: 1 if n else -1]))
        found = doing.store.load(keys).records
        assert [found[key].duplicates for key in keys] == [2, 2]

    def test_last_two_sent_at_once(self, doing: Doing) -> None:
        """Of two that send the last two messages at once, one completes the parent."""
        for n in range(_ROUNDS):
            parent = key_of(str(n))
            claim = granted(doing.ledger.claim(parent))
            doing.ledger.handled(claim, None, [deferred(d, d, parent=parent) for d in "ab"])
            messages = doing.ledger.mailbox.take(2, "60s", [parent])
            at_once(2, lambda n: doing.ledger.mailbox.sent([messages[n]]))  # noqa: B023 - all end here.
            assert record_of(doing.ledger, parent).state is State.COMPLETED
        assert doing.ledger.mailbox.backlog().waiting == 0

    def test_purges_of_steps_race(self, doing: Doing, clock: AdvancingClock) -> None:
        """Several cleaners at once leave neither a record nor a step."""
        keys = [key_of(str(n)) for n in range(40)]
        for key in keys:
            claim = granted(doing.ledger.claim(key))
            doing.ledger.keep_step(claim, "step", 1)
            doing.ledger.complete(claim)
        clock.advance(100)
        query = Query(older_than_s=50, limit=3)

        def purge(_: int) -> int:
            return sum(iter(lambda: doing.store.purge(query, PURGEABLE), 0))

        assert sum(at_once(_TRANSACTIONS, purge)) == 40
        assert [doing.ledger.steps(key) for key in keys] == [{}] * 40

    def test_takes_race(self, doing: Doing) -> None:
        """Of many relays at once none is given what another has, and each lane stays in order."""
        lanes, each = 12, 12
        order = [(lane, n) for n in range(each) for lane in range(lanes)]
        doing.keep(
            [
                deferred(
                    f"{lane}/{n}", key=str(lane), position=place, parent=key_of(str(place % 7))
                )
                for place, (lane, n) in enumerate(order)
            ]
        )
        given: dict[str | None, list[int]] = defaultdict(list)

        def send(_: int) -> None:
            while doing.backlog().waiting:
                taken = doing.take(7, HOLD_S)
                for message in taken:
                    given[message.message.key].append(message.number or 0)
                doing.remove(taken)

        at_once(_TRANSACTIONS, send)
        assert sum(map(len, given.values())) == lanes * each
        assert [numbers == sorted({*numbers}) for numbers in given.values()] == [True] * lanes

    def test_operators_race(self, doing: Doing) -> None:
        """Of two operators, and workers who take what is retried, each is told what happens: every
        dead letter is retried or discarded, and what is retried is there, or was taken.
        """
        letters = [replace(retry(str(n)), is_set_aside=True) for n in range(_LETTERS)]
        doing.keep(letters)
        ids = [each.number or 0 for each in doing.waiting([each.parent for each in letters])]
        again, gone, taken = list[int](), list[int](), list[int]()

        def decide(racer: int) -> None:
            match racer:
                case 0:
                    again.extend(n for n in ids if doing.ledger.retry_dead(n))
                case 1:
                    gone.extend(n for n in ids if doing.ledger.discard_dead(n))
                case _:
                    for _ in ids:
                        some = doing.take(1, HOLD_S, queue=RETRIES, counts=True)
                        taken.extend(doing.remove_held(some))

        at_once(3, decide)
        left = [each.number or 0 for each in doing.numbered(ids)]
        assert sorted([*again, *gone]) == ids
        assert sorted([*taken, *left]) == sorted(again)
        assert not [each for each in doing.numbered(ids) if each.is_set_aside]

    def test_operators_race_for_what_was_refused(self, doing: Doing) -> None:
        """The same of messages that were refused: sent again, all or some, or discarded."""
        doing.keep([replace(deferred(str(n)), is_set_aside=True) for n in range(_LETTERS)])
        ids = [each.number or 0 for each in doing.waiting([PARENT])]
        mailbox = doing.ledger.mailbox
        again, gone, counted = list[int](), list[int](), list[int]()

        def decide(racer: int) -> None:
            match racer:
                case 0:
                    for n in ids:
                        again.extend(each.number or 0 for each in mailbox.send_again_numbered([n]))
                case 1:
                    for n in reversed(ids):
                        gone.extend(each.number or 0 for each in mailbox.discard_unsent([n]))
                case _:
                    counted.append(mailbox.send_again())

        at_once(3, decide)
        left = [each.number or 0 for each in doing.waiting([PARENT])]
        assert len(again) + len(gone) + sum(counted) == len(ids)
        assert sorted([*left, *gone]) == ids
        assert {*again} <= {*left}

    def test_discarded_or_taken(self, doing: Doing) -> None:
        """Of an operator who discards what was never tried, and a worker who takes it, one does."""
        rows = [retry(str(n)) for n in range(_LETTERS)]
        doing.keep(rows)
        taken: list[int] = []
        discarded: list[int] = []

        def decide(racer: int) -> None:
            for row in rows:
                if racer:
                    some = doing.take(1, HOLD_S, queue=RETRIES)
                    taken.extend(each.number or 0 for each in some)
                else:
                    with suppress(RefusedError):
                        doing.ledger.discard(row.key, by="ann")
                        discarded.extend(each.number or 0 for each in doing.waiting([row.key]))

        at_once(2, decide)
        assert len({*taken, *discarded}) == len(taken) + len(discarded) == _LETTERS


def _later(record: Record, **fields: object) -> Record:
    return record._replace(version=record.version + 1, lease_until=LEASE_S, **fields)  # type: ignore[arg-type]
