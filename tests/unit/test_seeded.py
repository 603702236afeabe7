"""Programs that seed `random`: what must be unlike anybody else's stays so."""

import random
from contextlib import closing
from pathlib import Path

import pytest
from tests.unit.conftest import Sql

from oncely.core.commands import Busy, Granted
from oncely.core.record import Key
from oncely.ledger.ledger import open_ledger

KEYS = [Key("billing", message_id) for message_id in ("1", "2", "3")]


@pytest.mark.parametrize("together", [True, False])
def test_two_workers_with_the_same_seed(tmp_path: Path, together: bool) -> None:
    """Neither takes the other's claim for its own."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with closing(open_ledger(url)) as first, closing(open_ledger(url)) as second:
        first.migrate()
        for ledger, answer in [(first, Granted), (second, Busy)]:
            random.seed(42)
            outcomes = ledger.claim_many(KEYS) if together else map(ledger.claim, KEYS)
            assert [type(outcome) for outcome in outcomes] == [answer] * 3


def test_messages_sent_with_the_same_seed(sql: Sql) -> None:
    """Each has a name of its own."""
    ids: set[str] = set()
    for _ in range(2):
        random.seed(42)
        with sql.engine.begin() as connection, sql.ledger.transaction(connection) as inbox:
            ids.add(inbox.send("mails", "body"))
    assert len(ids) == 2


def test_the_sequence_of_a_program() -> None:
    """It is the program's alone."""
    random.seed(42)
    expected = random.random()
    random.seed(42)
    with closing(open_ledger("memory://")) as ledger:
        ledger.claim_many(KEYS)
    assert random.random() == expected
