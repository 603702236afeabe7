"""Claims on a store, through the Ledger."""

from collections.abc import Sequence

import pytest
from tests.records import granted, record_of

from oncely.core.commands import (
    Busy,
    Duplicate,
    Fenced,
    Granted,
    Handled,
    Written,
)
from oncely.core.errors import FencedError, RefusedError
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key, State, birth_of
from oncely.ledger.arguments import new_token, to_claim
from oncely.ledger.driver import SyncDriver, run_inline
from oncely.ledger.ledger import Ledger
from oncely.testing.tools import AdvancingClock, at_once

KEY = Key("billing", "abc-123")
_RACERS = 20


class ClaimRules:
    """What the table of rules answers, carried out by a ledger on a store."""

    # ---- Asking ----------------------------------------------------------------------------------

    def test_answers_do_not_depend_on_those_before(self, ledger: Ledger) -> None:
        """The outcome of a claim does not depend on whether the last claims were new or known."""
        keys = {name: Key("billing", name) for name in ("done", "held", "failed", "new", "newer")}
        claims = {name: granted(ledger.claim(keys[name])) for name in ("done", "held", "failed")}
        ledger.complete(claims["done"])
        ledger.fail(claims["failed"], "no")
        known = [keys["done"]] * 2
        for new in ("new", "newer"):
            assert {type(outcome) for outcome in ledger.claim_many(known)} == {Duplicate}
            asked = [keys["done"], keys["held"], keys[new], keys["done"]]
            answers = [type(outcome) for outcome in ledger.claim_many(asked)]
            assert answers == [Duplicate, Busy, Granted, Duplicate]
        failed = granted(ledger.claim(keys["failed"]))
        assert (failed.attempts, failed.fence) == (2, 2)

    def test_claim_is_asked_again(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """Whoever asks again under its token is given the same claim, its lease from now on, also
        when it has run out; nobody else is. Once it was taken over it is the other's.
        """
        token = new_token()
        for _ in range(3):
            claim = granted(ledger.claim(KEY, "60s", token=token))
            assert (claim.fence, claim.attempts, claim.former) == (1, 1, None)
            assert isinstance(ledger.claim(KEY, "60s"), Busy)
            clock.advance(50)
        assert isinstance(ledger.claim(KEY, "60s"), Busy)
        clock.advance(50)
        granted(ledger.claim(KEY, "60s", token=token))
        clock.advance(61)
        assert granted(ledger.claim(KEY, "60s")).fence == 2
        assert isinstance(ledger.claim(KEY, "60s", token=token), Busy)
        with pytest.raises(FencedError):
            ledger.complete(claim)

    def test_delivery_of_what_is_handled(self, ledger: Ledger) -> None:
        """Deliveries that come while deferred messages wait are counted, but none that is asked
        again.
        """
        ledger.handled(granted(ledger.claim(KEY)))
        token = new_token()
        for _ in range(3):
            assert isinstance(ledger.claim(KEY, token=token), Handled)
        assert record_of(ledger, KEY).duplicates == 1
        assert isinstance(ledger.claim(KEY), Handled)
        assert record_of(ledger, KEY).duplicates == 2

    # ---- With a claim ----------------------------------------------------------------------------

    def test_old_fence_changes_nothing(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """After a takeover all writes of the former holder are fenced, and change nothing."""
        old = granted(ledger.claim(KEY, "60s"))
        clock.advance(61)
        new = granted(ledger.claim(KEY, "60s"))
        before = record_of(ledger, KEY)
        outcomes = [
            *ledger.handled_many([old]),
            *ledger.complete_many([old], ["old"]),
            *ledger.fail_many([old], ["old"]),
            *ledger.release_many([old]),
            *ledger.extend_many([old], "60s"),
        ]
        assert outcomes == [Fenced(before)] * 5
        assert record_of(ledger, KEY) == before
        ledger.complete(new)

    def test_senders_race(self, ledger: Ledger) -> None:
        """Of those who ask at once for what is handled each gets a fence of its own, and one can
        complete it.
        """
        ledger.handled(granted(ledger.claim(KEY)))

        def ask(_: int) -> Claim:
            outcome = ledger.claim(KEY, "60s")
            assert isinstance(outcome, Handled)
            return outcome.claim

        claims = at_once(_RACERS, ask)
        assert sorted(claim.fence for claim in claims) == list(range(2, _RACERS + 2))
        outcomes = ledger.complete_many(sorted(claims, key=lambda claim: claim.fence))
        assert _kinds(outcomes[:-1]) == ["Fenced"] * (_RACERS - 1)
        assert isinstance(outcomes[-1], Written)

    def test_result_of_what_is_handled(self, ledger: Ledger) -> None:
        """A result kept with handled stays when it is completed, unless that brings another."""
        keys = [Key("billing", name) for name in ("kept", "replaced", "finished")]
        claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
        results = [{"charged": 7}, "first", ["é", None]]
        assert _kinds(ledger.handled_many(claims, results)) == ["Written"] * 3
        ledger.complete(claims[0])
        ledger.complete(claims[1], "second")
        ledger.mailbox.finish([keys[2]])
        found = [record_of(ledger, key).result for key in keys]
        assert found == [{"charged": 7}, "second", ["é", None]]

    # ---- Without a claim -------------------------------------------------------------------------

    def test_deliveries_are_counted(self, ledger: Ledger) -> None:
        """A delivery that asks for no claim is one more attempt, whatever the record's state; the
        holder of the claim can complete all the same.
        """
        with pytest.raises(RefusedError):
            ledger.count_delivery(KEY)
        claim = granted(ledger.claim(KEY, "60s"))
        assert ledger.count_delivery(KEY).attempts == 2
        ledger.complete(claim, "done")
        before = record_of(ledger, KEY)
        counted = ledger.count_delivery(KEY)
        assert (counted.attempts, counted.duplicates) == (3, 0)
        found = record_of(ledger, KEY)
        assert found == before._replace(
            attempts=3, version=found.version, last_seen=found.last_seen
        )

    # ---- Operators -------------------------------------------------------------------------------

    def test_duplicates_keep_a_record_alive(self, ledger: Ledger, clock: AdvancingClock) -> None:
        """Retention counts from the last time seen, and a duplicate is such a time."""
        ledger.complete(granted(ledger.claim(KEY)))
        clock.advance(20 * 86_400)
        assert isinstance(ledger.claim(KEY), Duplicate)
        clock.advance(20 * 86_400)
        assert ledger.purge("30d") == 0
        clock.advance(11 * 86_400)
        assert ledger.purge("30d") == 1


class ClaimStatements:
    """Claims of many at once, and of many who ask at once: a store's own statements."""

    def test_claim_of_a_dead_worker(self, ledger: Ledger) -> None:
        """It ends at once, if it is as it was seen; the worker has nothing more to say."""
        claim = granted(ledger.claim(KEY, "60s"))
        seen = record_of(ledger, KEY)
        claim = ledger.extend(claim, "60s")
        with pytest.raises(RefusedError, match=r"is processing \(lease until .* UTC\)"):
            ledger.end_claim(seen, by="anna")
        ledger.end_claim(record_of(ledger, KEY), by="anna", why="no power")
        with pytest.raises(FencedError):
            ledger.complete(claim)
        assert granted(ledger.claim(KEY)).fence == 2

    def test_many_in_one(self, ledger: Ledger) -> None:
        """Many claims have one outcome each, in order; of two for one key the other is busy."""
        keys = [Key("billing", str(n)) for n in range(500)]
        ledger.complete(granted(ledger.claim(keys[7])))
        outcomes = [*ledger.claim_many([*keys, keys[3]])]
        assert isinstance(outcomes.pop(), Busy)
        assert isinstance(outcomes.pop(7), Duplicate)
        assert all(isinstance(outcome, Granted) for outcome in outcomes)

    def test_many_are_asked_again(self, ledger: Ledger) -> None:
        """The same for many at once; of two for one key the other stays busy."""
        keys = [Key("billing", str(n)) for n in range(50)]
        asked = [*keys, keys[3], keys[3]]
        token = new_token()
        ledger.claim_many(keys[:20], token=token)
        outcomes = [ledger.claim_many(asked, token=token) for _ in range(2)][-1]
        assert _kinds(outcomes[-2:]) == ["Busy"] * 2
        claims = [granted(outcome) for outcome in outcomes[:-2]]
        assert {(claim.fence, claim.attempts) for claim in claims} == {(1, 1)}
        assert all(isinstance(each, Written) for each in ledger.complete_many(claims))

    def test_many_claims_written_at_once(self, ledger: Ledger) -> None:
        """Many completes have one answer each, in order, and one old fence spoils no other."""
        keys = [Key("billing", str(n)) for n in range(100)]
        claims = [granted(outcome) for outcome in ledger.claim_many(keys)]
        ledger.release(claims[42])
        outcomes = [*ledger.complete_many(claims, list(range(100)))]
        assert outcomes.pop(42) == Fenced(None)
        assert all(isinstance(outcome, Written) for outcome in outcomes)
        assert record_of(ledger, keys[99]).result == 99

    @pytest.mark.parametrize("rounds", [1, 2])
    def test_many_claims_with_tokens_of_their_own(self, ledger: Ledger, rounds: int) -> None:
        """Claims that were asked for with a token each are granted, also again, and written; one
        that is gone is fenced, and spoils no other.
        """
        keys = [Key("billing", str(n)) for n in range(100)]
        marks = [f"mark {n}" for n in range(100)]
        first = new_token()
        tokens = [birth_of(first + 2 * n) for n in range(100)]
        asked = to_claim(keys, "60s", Policy(), marks, None, None, None, tokens)
        driver = SyncDriver(ledger)
        for _ in range(rounds):
            outcomes = run_inline(driver.settle(asked))
            claims = [each.claim for each in outcomes if isinstance(each, Granted)]
            assert [claim.birth for claim in claims] == tokens
            assert {(claim.fence, claim.attempts) for claim in claims} == {(1, 1)}
        assert _kinds(ledger.extend_many(claims, "90s")) == ["Written"] * 100
        ledger.release(claims[42])
        outcomes = [*ledger.complete_many(claims)]
        assert outcomes.pop(42) == Fenced(None)
        assert _kinds(outcomes) == ["Written"] * 99
        found = [record_of(ledger, key) for key in (keys[41], keys[43])]
        assert [(each.state, each.birth, each.fingerprint) for each in found] == [
            (State.COMPLETED, tokens[n], marks[n]) for n in (41, 43)
        ]


def _kinds(outcomes: Sequence[object]) -> list[str]:
    return sorted(type(outcome).__name__ for outcome in outcomes)
