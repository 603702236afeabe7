"""Workers in processes of their own, that claim and complete until they are told to stop.

Each writes what it was granted, and what it was told is completed, into a file: one event a line.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple, TextIO

from tests.conditions import LIMIT_S

from oncely.core.commands import Granted, Written
from oncely.core.errors import StoreUnavailable
from oncely.core.policy import Policy
from oncely.core.record import Claim, Key
from oncely.ledger.ledger import Ledger, open_ledger

ROOT = Path(__file__).parents[2]
HELD, RETRIED = "held", "retried"

_POLICIES = {
    # What is in doubt stays so: nothing runs twice, whatever happens.
    HELD: Policy(on_in_doubt="hold", lease="100ms"),
    # What is in doubt runs again, each time under another fence.
    RETRIED: Policy(on_in_doubt="retry", lease="100ms", tries=1_000_000),
}
_BATCH = 20
_BACK = 3
"""How many batches a worker looks back for what others left in doubt."""


class Grant(NamedTuple):
    """A claim, as the worker that has it wrote it down."""

    consumer: str
    message_id: str
    fence: int
    birth: int


class Diary(NamedTuple):
    """What all workers wrote down."""

    grants: Sequence[Grant]
    completed: Sequence[Key]


@contextmanager
def working(url: str, folder: Path, workers: int) -> Iterator[None]:
    """Workers that work for as long as the block. Raises AssertionError where one breaks down."""
    command = [sys.executable, "-m", "tests.integration.workers", url]
    started = [
        subprocess.Popen(
            [*command, folder / f"{number}.log"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(workers)
    ]
    try:
        yield
        complaints = [process.communicate(timeout=LIMIT_S)[1] for process in started]
        if any(complaints) or any(process.returncode for process in started):
            raise AssertionError("\n".join(complaints) or "a worker was killed")
    finally:
        for process in started:
            process.kill()
            process.communicate()


def read_diary(folder: Path) -> Diary:
    """What all workers have written down so far."""
    grants, completed = [], []
    for file in folder.glob("*.log"):
        # What follows the last end of a line is being written.
        whole, _, _ = file.read_text().rpartition("\n")
        for line in whole.splitlines():
            event, consumer, message_id, *numbers = line.split()
            if event == "granted":
                grants.append(Grant(consumer, message_id, *map(int, numbers)))
            else:
                completed.append(Key(consumer, message_id))
    return Diary(grants, completed)


def _work(ledger: Ledger, diary: TextIO, stop: Event) -> None:
    for batch in count():
        if stop.is_set():
            return
        numbers = range(max(0, batch - _BACK) * _BATCH, (batch + 1) * _BATCH)
        for consumer, policy in _POLICIES.items():
            claims = _claim(ledger, [Key(consumer, str(n)) for n in numbers], policy)
            for claim in claims:
                print("granted", *claim.key, claim.fence, claim.birth, file=diary)
            for claim in _complete(ledger, claims, stop):
                print("completed", *claim.key, file=diary)


def _claim(ledger: Ledger, keys: Sequence[Key], policy: Policy) -> list[Claim]:
    try:
        outcomes = ledger.claim_many(keys, policy=policy)
    except StoreUnavailable:
        # What was stored all the same is in doubt now.
        return []
    return [outcome.claim for outcome in outcomes if isinstance(outcome, Granted)]


def _complete(ledger: Ledger, claims: Sequence[Claim], stop: Event) -> list[Claim]:
    """Complete until there is an answer; those that are completed under their claim."""
    while not stop.is_set():
        try:
            outcomes = ledger.complete_many(claims)
        except StoreUnavailable:
            continue
        pairs = zip(claims, outcomes, strict=True)
        return [claim for claim, outcome in pairs if isinstance(outcome, Written)]
    return []


def _main(url: str, file: str) -> None:
    stop = Event()

    def await_the_end() -> None:
        sys.stdin.read()
        stop.set()

    Thread(target=await_the_end, daemon=True).start()
    with Path(file).open("w", buffering=1) as diary:
        _work(open_ledger(url), diary, stop)


if __name__ == "__main__":
    _main(*sys.argv[1:])
