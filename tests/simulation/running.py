"""`simulate`: many workers over a store and a broker that fail on purpose, all from one seed."""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.history import History
from tests.simulation.judging import Promises
from tests.simulation.oracle import judge
from tests.simulation.replacing import replaced
from tests.simulation.scenario import Scenario, draw_scenario
from tests.simulation.workers import CONSUMER
from tests.simulation.world import World

from oncely.core.durations import lease_seconds, seconds
from oncely.core.message import Message


@dataclass(frozen=True)
class Simulation:
    """What a seed has come to."""

    seed: int
    history: History
    wrongs: list[str]
    """What must not be, a sentence each."""
    scenario: Scenario

    def told(self) -> str:
        """What is wrong, and how to see it again."""
        wrongs = "\n".join(f"  {wrong}" for wrong in self.wrongs)
        return (
            f"seed {self.seed} ({self.scenario.policy_name}):\n{wrongs}\n"
            f"replay: python -m tests.simulation --seed {self.seed} --show"
        )


class SimulationFailed(AssertionError):
    """Something that must always hold does not. The text names the seed that shows it again."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.told())
        self.simulation = simulation


def simulate(seed: int, *, handler: Callable[[Message], Any] | None = None) -> Simulation:
    """Run one simulation; the same seed does exactly the same again.

    `handler`, where one is given, takes the messages in place of the simulation's own. Not for
    several threads at once. Raises SimulationFailed where a guarantee is broken.
    """
    simulation = simulated(seed, handler=handler)
    if simulation.wrongs:
        raise SimulationFailed(simulation)
    return simulation


def simulated(seed: int, *, handler: Callable[[Message], Any] | None = None) -> Simulation:
    """As `simulate`, for whoever looks at what is wrong."""
    draws = random.Random(seed)
    scenario = draw_scenario(draws)
    world = World(scenario, draws, handler)
    with _quiet(), replaced(world.time, world.threads, world.random):
        world.run()
    wrongs = judge(world.history, _promises(scenario, world.settled_at, sends=handler is None))
    return Simulation(seed, world.history, wrongs, scenario)


def _promises(scenario: Scenario, settled_at: float | None, *, sends: bool) -> Promises:
    settings = scenario.settings
    return Promises(
        tries=settings["tries"],
        lease_s=lease_seconds(settings["lease"]) or 0.0,
        on_failed=settings.get("on_failed", "retry"),
        on_in_doubt=settings.get("on_in_doubt", "retry"),
        on_busy=settings.get("on_busy", "requeue"),
        delays_s=[seconds(delay) for delay in settings["backoff"]],
        order={
            (CONSUMER, each.id): each.key
            for each in scenario.messages
            if scenario.is_ordered and each.key is not None
        },
        published={
            (CONSUMER, each.id): each.json()["sends"] if sends else 0 for each in scenario.messages
        },
        settled_at=settled_at,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """What goes wrong on purpose is not logged."""
    former = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(former)
