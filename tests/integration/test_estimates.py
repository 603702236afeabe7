"""What a large ledger adds up to, without reading all of it."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.conformance.conftest import url_of
from tests.turns import in_turn

from oncely.core.commands import Granted
from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

_MOST = 500


@pytest.fixture(params=in_turn("store of estimates", ("sqlite", "postgresql")))
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """A ledger with 8,000 completed records, a quarter of them of another consumer."""
    with closing(open_ledger(url_of(request.param, request, tmp_path))) as opened:
        opened.migrate()
        for start in range(0, 8_000, 1_000):
            keys = [
                Key("mail" if n % 4 == 0 else "billing", f"m{n}")
                for n in range(start, start + 1_000)
            ]
            _complete(opened, keys)
        yield opened


def _complete(ledger: Ledger, keys: list[Key]) -> None:
    outcomes = ledger.claim_many(keys)
    ledger.complete_many([each.claim for each in outcomes if isinstance(each, Granted)])


def test_completed_are_estimated(ledger: Ledger) -> None:
    """A sample tells what is completed, as an estimate; below the limit it is counted."""
    found = ledger.tallies(_MOST)
    billing, mail = found["billing", State.COMPLETED], found["mail", State.COMPLETED]
    assert billing.is_estimate
    assert billing.count == pytest.approx(6_000, rel=0.2)
    assert mail.count == pytest.approx(2_000, rel=0.3)
    exact = ledger.tallies(8_000)
    assert not exact["billing", State.COMPLETED].is_estimate
    assert exact["billing", State.COMPLETED].count == 6_000


def test_what_is_not_completed_is_counted(ledger: Ledger) -> None:
    """However few they are among however many: none is missed, and leases are looked at."""
    failed = ledger.claim(Key("billing", "bad"))
    assert isinstance(failed, Granted)
    ledger.fail(failed.claim, "no", final=True)
    ledger.claim(Key("rare", "stuck"), lease=0.001)
    ledger.claim(Key("rare", "running"))
    found = ledger.tallies(_MOST)
    assert found["billing", State.FAILED].count == 1
    stuck = found["rare", State.PROCESSING]
    assert (stuck.count, stuck.lease_over, stuck.is_estimate) == (2, 1, False)


def test_more_not_completed_than_the_limit(ledger: Ledger) -> None:
    """Then they are estimates as well, and at least as many as were read."""
    ledger.claim_many([Key("billing", f"open{n}") for n in range(900)], lease=0.001)
    tally = ledger.tallies(_MOST)["billing", State.PROCESSING]
    assert tally.is_estimate
    assert _MOST < tally.count == pytest.approx(900, rel=0.5)
    assert tally.lease_over >= _MOST


def test_consumer_that_the_sample_misses(ledger: Ledger) -> None:
    """Who told its retention is shown, with none as far as is known."""
    ledger.keep_retention("seldom", "30d")
    tally = ledger.tallies(_MOST)["seldom", State.COMPLETED]
    assert (tally.count, tally.is_estimate) == (0, True)
