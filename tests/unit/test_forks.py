"""A fork while another thread uses the ledger: parent and child go on."""

import signal
import threading
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from tests.conditions import LIMIT_S
from tests.processes import exit_of, forked
from tests.records import granted, record_of

from oncely.core.record import Key, State
from oncely.ledger.ledger import Ledger, open_ledger

_FORKS = 10

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Claimer(threading.Thread):
    """Claims and completes one message after the other, until it is stopped."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        super().__init__(daemon=True, name=name)
        self._ledger = ledger
        self._stopped = threading.Event()
        self.done = 0

    def run(self) -> None:
        for number in count():
            if self._stopped.is_set():
                return
            key = Key("billing", f"{self.name}-{number}")
            self._ledger.complete(granted(self._ledger.claim(key, "60s")))
            self.done += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join(LIMIT_S)
        assert not self.is_alive()


def _work_in_child(ledger: Ledger, number: int) -> None:
    """Claim messages of its own; a child that cannot is killed."""
    signal.alarm(int(LIMIT_S))
    for n in range(3):
        key = Key("billing", f"child-{number}-{n}")
        ledger.complete(granted(ledger.claim(key, "60s")))


def test_fork_while_others_claim(any_ledger: Ledger) -> None:
    """Children that are forked while other threads are anywhere in a claim claim their own messages
    and exit; the parent's threads go on, and lose nothing.
    """
    claimers = [Claimer(any_ledger, f"parent-{n}") for n in range(3)]
    for claimer in claimers:
        claimer.start()
    works = [partial(_work_in_child, any_ledger, number) for number in range(_FORKS)]
    statuses = [exit_of(forked(work)) for work in works]
    for claimer in claimers:
        claimer.stop()
    assert statuses == [0] * _FORKS
    granted(any_ledger.claim(Key("billing", "after")))
    for claimer in claimers:
        assert claimer.done
        for number in range(claimer.done):
            record = record_of(any_ledger, Key("billing", f"{claimer.name}-{number}"))
            assert record.state is State.COMPLETED


def test_fork_of_a_fork(tmp_path: Path) -> None:
    """A child forks as well as its parent, whatever that has of what joins transactions."""
    engine = create_engine(f"sqlite:///{tmp_path / 'ledger.db'}")
    with closing(open_ledger(engine)) as ledger:
        ledger.migrate()
        with engine.begin() as connection, ledger.transaction(connection) as inbox:
            granted(inbox.claim(Key("billing", "1")))

        def fork_again() -> None:
            assert exit_of(forked(lambda: None)) == 0

        assert exit_of(forked(fork_again)) == 0
    engine.dispose()
