"""A discrete-event simulator of the asynchronous loop: pure Python, no torch, no numpy."""

from hpcrl.planning.simulation.durations import Durations, load_durations, save_durations
from hpcrl.planning.simulation.from_plan import durations_from_plan
from hpcrl.planning.simulation.result import SimulationResult
from hpcrl.planning.simulation.scenario import Failures, Scenario, make_scenario
from hpcrl.planning.simulation.simulate import Simulation, simulate

__all__ = [
    "Durations",
    "Failures",
    "Scenario",
    "Simulation",
    "SimulationResult",
    "durations_from_plan",
    "load_durations",
    "make_scenario",
    "save_durations",
    "simulate",
]
