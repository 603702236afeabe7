"""Purging beside others at work, and past many records that stay."""

from contextlib import closing

import pytest
from sqlalchemy import text
from tests.conditions import wait_until
from tests.integration.callers import Place
from tests.records import granted

from oncely.core.commands import Granted
from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger

pytestmark = pytest.mark.parametrize("place", ["postgresql", "mysql"], indirect=True)

LIVE, OLD, BATCH = 4_000, 1_000, 50

_ROWS_READ = {
    "postgresql": "SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) FROM pg_stat_user_tables"
    " WHERE relname = 'processed_messages'",
    "mysql": "SELECT sum(variable_value) FROM information_schema.global_status"
    " WHERE variable_name IN ('HANDLER_READ_NEXT', 'HANDLER_READ_RND_NEXT')",
}


@pytest.mark.parametrize("with_steps", [False, True])
def test_locked_rows_are_left(place: Place, with_steps: bool) -> None:
    """A record that a transaction is at work on stays; the others are removed meanwhile."""
    _complete(place, OLD)
    if with_steps:
        kept = granted(place.ledger.claim(Key("billing", "with a step")))
        place.ledger.keep_step(kept, "step", 1)
    held = "SELECT id FROM processed_messages WHERE message_id = '7' FOR UPDATE"
    with place.engine.connect() as connection:
        # Else MariaDB locks what is beside it, too.
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL READ COMMITTED"))
        connection.execute(text(held))
        assert place.ledger.purge("0s", batch=BATCH) == OLD - 1
        assert place.ledger.find(Key("billing", "7")) is not None
    assert place.ledger.purge("0s") == 1


def test_purge_goes_on_where_it_was(place: Place) -> None:
    """A purge of many batches reads past the records that stay once or twice, not for each."""
    live = place.ledger.claim_many([Key("live", str(n)) for n in range(LIVE)])
    assert {type(outcome) for outcome in live} == {Granted}
    _complete(place, OLD)
    before = _rows_read(place)
    with closing(open_ledger(place.url)) as ledger:
        assert ledger.purge("0s", batch=BATCH) == OLD
    read = wait_until(lambda: _rows_read(place) - before)
    assert OLD < read < 5 * (LIVE + OLD)


def test_purge_begins_again(place: Place) -> None:
    """What was before the place where a purge stopped is found by the next one."""
    _complete(place, 2 * BATCH)
    ledger = place.ledger
    with pytest.raises(_StopError):
        ledger.purge("0s", batch=BATCH, on_batch=_stop)
    _complete(place, 2 * BATCH, "later")
    assert ledger.purge("0s", batch=BATCH) == 3 * BATCH
    assert ledger.counts() == {}


class _StopError(Exception):
    """Stops a purge."""


def _stop(_: int) -> None:
    raise _StopError


def _complete(place: Place, number: int, prefix: str = "") -> None:
    outcomes = place.ledger.claim_many([Key("billing", f"{prefix}{n}") for n in range(number)])
    place.ledger.complete_many([granted(outcome) for outcome in outcomes])


def _rows_read(place: Place) -> int:
    with place.engine.connect() as connection:
        return int(connection.execute(text(_ROWS_READ[place.kind])).scalar_one())
