"""Four processes of sixteen threads, and the same messages for all of them."""

import os

import pytest
from tests.integration.callers import opened
from tests.integration.joiners import run_processes

from oncely.core.record import State

_MESSAGES = int(os.environ.get("ONCELY_TEST_STORM", "300"))
_PROCESSES = 4
_THREADS = 16


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_every_row_once(kind: str, request: pytest.FixtureRequest) -> None:
    """Every process delivers every message, each in a transaction with a row of business in a
    table that forbids none twice: in the end each row is there once, and nobody met an error.
    """
    with opened(kind, request) as place:
        run_processes(place.url, _PROCESSES, _THREADS, _MESSAGES)
        assert sorted(place.rows()) == sorted(f"message-{n}" for n in range(_MESSAGES))
        assert place.ledger.counts() == {("storm", State.COMPLETED): _MESSAGES}
