"""A worker whose clock is wrong: leases go by the store's clock, and by no other."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.conditions import wait_until
from tests.conformance.conftest import SHARED, ledger_url_of
from tests.integration.misled import CONSUMER, Worker, misled_worker
from tests.records import granted

from oncely._util.clock import undo_passing
from oncely.core.commands import Busy
from oncely.core.record import Key
from oncely.ledger.ledger import Ledger, open_ledger
from oncely.testing import pass_time

_HOURS_S = 7_200.0
_SERVERS = tuple(kind for kind in SHARED if kind != "sqlite")


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    """The URL of a ledger without a row in a store of that kind."""
    return ledger_url_of(kind, request)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """The ledger of a worker whose clock is right."""
    with closing(open_ledger(url)) as ledger:
        yield ledger


# ---- The worker's machine is wrong -------------------------------------------------------------


@pytest.fixture(params=["+2h", "-2h"])
def worker(request: pytest.FixtureRequest, url: str) -> Iterator[Worker]:
    """A process that takes the time to be two hours from what it is, one way or the other."""
    with misled_worker(url, request.param) as worker:
        off_s = _HOURS_S if request.param == "+2h" else -_HOURS_S
        assert worker.time() == pytest.approx(time.time() + off_s, abs=60)
        yield worker


@pytest.mark.in_turn("wrong clocks")
@pytest.mark.parametrize("kind", _SERVERS)
def test_wrong_machine(ledger: Ledger, worker: Worker) -> None:
    """A worker on a machine with a wrong clock neither takes early, nor holds longer or shorter."""
    granted(ledger.claim(Key(CONSUMER, "theirs"), "60s"))
    assert worker.claim("theirs", "60s") == "Busy"
    assert worker.claim("own", "60s") == "Granted"
    _check_ends(ledger, "own", in_s=60)
    assert worker.extend("own", "90s") == "extended"
    _check_ends(ledger, "own", in_s=90)
    granted(ledger.claim(Key(CONSUMER, "over"), "100ms"))
    wait_until(lambda: worker.claim("over", "60s") == "Granted")
    _check_ends(ledger, "over", in_s=60)


def _check_ends(ledger: Ledger, message_id: str, in_s: float) -> None:
    """The message is busy for others, and is told to be until then, by the store's clock."""
    outcome = ledger.claim(Key(CONSUMER, message_id))
    assert isinstance(outcome, Busy)
    assert outcome.retry_at == pytest.approx(ledger.now() + in_s, abs=20)
    assert ledger.now() == pytest.approx(time.time(), abs=60)
    assert outcome.record.last_seen == pytest.approx(ledger.now(), abs=20)


# ---- A test lets time pass ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHARED)
def test_time_that_a_test_lets_pass(ledger: Ledger) -> None:
    """It passes for every store that processes share: a lease is over, though nobody waited; and
    is undone afterwards.
    """
    key = Key(CONSUMER, "1")
    granted(ledger.claim(key, "1h"))
    assert isinstance(ledger.claim(key, "1h"), Busy)
    pass_time("2h")
    try:
        granted(ledger.claim(key, "1h"))
    finally:
        undo_passing()
    assert isinstance(ledger.claim(key, "1h"), Busy)
    assert abs(ledger.now() - time.time()) < 60
