"""One store among many processes: in a file, and on a server."""

import os
from contextlib import closing

from tests.processes import claim_all, migrate_and_count, run_at_once

from oncely.ledger.ledger import open_ledger

_KEYS = int(os.environ.get("ONCELY_TEST_KEYS", "500"))
_BATCH = 100


def test_processes_claim_the_same_keys(shared_url: str) -> None:
    """Twenty processes claim the same keys at once: each key is granted exactly once."""
    with closing(open_ledger(shared_url)) as ledger:
        ledger.migrate()
    answers = run_at_once(20, shared_url, claim_all, _KEYS, _BATCH)
    assert sorted(number for answer in answers for number in answer) == list(range(_KEYS))


def test_processes_migrate_a_fresh_store(shared_url: str) -> None:
    """Ten processes migrate a fresh store at once: all succeed, and one table is there."""
    assert run_at_once(10, shared_url, migrate_and_count) == [0] * 10
