"""Signal handlers that ask a ledger, wherever in another call of its own they come."""

from contextlib import closing
from itertools import count

import pytest
from tests.records import granted
from tests.unit.test_interrupts import interrupted

from oncely.core.record import Claim, Key
from oncely.ledger.ledger import open_ledger


@pytest.mark.timeout(120)
def test_a_handler_that_asks_the_ledger(postgresql_url: str) -> None:
    """It is answered, and so is the call that it has interrupted."""
    with closing(open_ledger(postgresql_url)) as ledger:
        ledger.migrate()
        granted(ledger.claim(Key("billing", "warm")))
        answered: list[Claim] = []

        def ask() -> None:
            answered.append(granted(ledger.claim(Key("billing", f"handler {len(answered)}"))))

        for place in count():
            if not interrupted(place, ledger, Key("billing", f"interrupted {place}"), ask):
                break
        assert len(answered) == place > 50
        assert sum(ledger.counts().values()) == 2 * place + 2
