"""From a scenario to its result."""

from __future__ import annotations

from hpcrl.simulation.inputs.scenario import Scenario
from hpcrl.simulation.loop.simulation import Simulation
from hpcrl.simulation.results.result import SimulationResult, summarize

__all__ = ["simulate"]


def simulate(scenario: Scenario) -> SimulationResult:
    """Simulate a scenario. Pure: equal scenarios give equal results."""
    simulation = Simulation(scenario)
    simulation.run()
    return summarize(simulation)
