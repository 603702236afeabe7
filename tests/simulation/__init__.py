"""A simulation of many workers over a store and a broker that fail on purpose: `simulate(seed)`."""

from tests.simulation.running import Simulation, SimulationFailed, simulate, simulated

__all__ = ["Simulation", "SimulationFailed", "simulate", "simulated"]
