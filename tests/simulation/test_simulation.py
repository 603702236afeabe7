"""Many workers over a store and a broker that fail on purpose: what must hold under every seed."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import pytest
from tests.conditions import LIMIT_S
from tests.simulation import Simulation, SimulationFailed, simulate, simulated

from oncely._util import clock
from oncely.core.message import Message
from oncely.ledger.arguments import new_token

_SEEDS = int(os.environ.get("ONCELY_TEST_SEEDS", "100"))
_PARTS = 10


@lru_cache(100)
def _simulated(seed: int) -> Simulation:
    """The same for all tests that only look at it."""
    return simulated(seed)


@pytest.mark.parametrize("part", range(_PARTS))
def test_every_guarantee_holds(part: int) -> None:
    """U1 to U6 and what the policies promise, whatever befalls the workers and the servers."""
    failing = [_simulated(seed) for seed in range(part, _SEEDS, _PARTS)]
    told = [simulation.told() for simulation in failing if simulation.wrongs]
    assert not told, "\n".join(told)


def test_a_seed_replays_exactly() -> None:
    """The same seed, the same history, event by event."""
    for seed in range(20):
        assert simulated(seed).history.text() == _simulated(seed).history.text()


def test_other_threads_of_the_process() -> None:
    """They have their own clock and randomness, and change nothing: the thread of a ledger that was
    opened before may beat meanwhile.
    """
    alone = simulated(7).history.text()
    drawn: list[float] = []
    with _beating(lambda: drawn.append(new_token() + clock.monotonic() - clock.wall_time())):
        beside = simulated(7).history.text()
    assert beside == alone
    assert drawn


@contextmanager
def _beating(beat: Callable[[], object]) -> Iterator[None]:
    stop, has_begun = threading.Event(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            beat()
            has_begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert has_begun.wait(LIMIT_S)
        yield
    finally:
        stop.set()
        thread.join()


def test_a_seed_replays_in_another_process() -> None:
    """What is in a set, or at which address, changes nothing."""
    program = (
        "from tests.simulation import simulated\n"
        "print(*(simulated(seed).history.digest() for seed in range(10)))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for hash_seed in ("1", "2")
    ]
    here = [_simulated(seed).history.digest() for seed in range(10)]
    assert told == [here, here]


def test_seeds_differ() -> None:
    """No two of them do the same."""
    digests = {_simulated(seed).history.digest() for seed in range(30)}
    assert len(digests) == 30


def test_everything_befalls_them() -> None:
    """What is to be survived does happen: nothing of it has fallen out of the simulation."""
    seen: Counter[str] = Counter()
    for seed in range(100):
        seen.update(event.what for event in _simulated(seed).history.events)
    wanted = {
        *("kill", "freeze", "stop", "interrupt", "was_interrupted"),
        *("store_away", "broker_away", "reset", "settle", "forget", "purge"),
        *("acknowledged", "dead_letter", "requeued", "arrived", "step_kept"),
    }
    assert wanted - {*seen} == set()


def test_a_handler_of_ones_own() -> None:
    """Users see their own handler under faults; what it breaks, they are told with the seed."""
    runs: list[str] = []

    def handle(message: Message) -> None:
        runs.append(message.id)

    simulation = simulate(3, handler=handle)
    assert {each.id for each in simulation.scenario.messages} == {*runs}


def test_what_fails_names_its_seed() -> None:
    """A failing run says what is wrong, and how to see it again."""
    simulation = replace(simulated(3), wrongs=["a fence has shrunk"])
    told = str(SimulationFailed(simulation))
    assert "a fence has shrunk" in told
    assert "python -m tests.simulation --seed 3 --show" in told
