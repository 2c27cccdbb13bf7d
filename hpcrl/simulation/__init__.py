"""A discrete-event simulator of the asynchronous loop: pure Python, no torch, no numpy."""

from hpcrl.simulation.inputs.durations import Durations, load_durations, save_durations
from hpcrl.simulation.inputs.from_plan import durations_from_outlook, durations_from_plan
from hpcrl.simulation.inputs.scenario import Failures, Scenario, make_scenario
from hpcrl.simulation.loop.simulation import Simulation
from hpcrl.simulation.results.result import SimulationResult
from hpcrl.simulation.simulate import simulate

__all__ = [
    "Durations",
    "Failures",
    "Scenario",
    "Simulation",
    "SimulationResult",
    "durations_from_outlook",
    "durations_from_plan",
    "load_durations",
    "make_scenario",
    "save_durations",
    "simulate",
]
