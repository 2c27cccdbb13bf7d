"""From a scenario to its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpcrl.planning.times.loop import waiting_share
from hpcrl.simulation.inputs.durations import HandoffDurations, TrainerDurations
from hpcrl.simulation.inputs.scenario import Failures, Scenario
from hpcrl.simulation.loop.simulation import Simulation
from hpcrl.simulation.results.result import SimulationResult, summarize

_STEPS_ALONE = 16
"""Steps beyond those in which the loop fills: enough for a mean, and few compared with a simulated day."""


_FEW = 8
"""Steps without which a mean is none."""
_MAIN = 0.8
"""Share of the work that a simulation is, about; the rest is that of engines alone."""


def simulate(scenario: Scenario, progress: Callable[[float], None] = lambda share: None) -> SimulationResult:
    """Simulate a scenario. Pure: equal scenarios give equal results.

    Parameters
    ----------
    progress:
        Called regularly with the finished share, from 0 to 1.
    """
    simulation = Simulation(scenario)
    simulation.run(lambda share: progress(_MAIN * share))
    result = summarize(simulation)
    if result.steps < max(_FEW, 2 * (scenario.recipe.rollouts.max_off_policy_steps + 1)):
        # the loop was still filling: figures of such steps do not show waiting
        return result
    alone_s = _engines_alone_s(scenario, result, lambda share: progress(_MAIN + (1 - _MAIN) * share))
    return result.model_copy(
        update={"engines_alone_s": alone_s, "engines_wait": waiting_share(alone_s, result.step_s.mean)}
    )


def _engines_alone_s(scenario: Scenario, result: SimulationResult, progress: Callable[[float], None]) -> float:
    """Return the seconds of a step whose trainer takes no time: in `hpcrl plan` the work of the engines."""
    steps = scenario.recipe.rollouts.max_off_policy_steps + 1 + _STEPS_ALONE
    handoff = scenario.durations.handoff
    durations = scenario.durations.model_copy(
        update={
            "trainer": TrainerDurations(forward_backward_per_token_s=0.0),
            "handoff": HandoffDurations(read_s=handoff.read_s, load_s=handoff.load_s),
        }
    )
    alone = Simulation(
        replace(
            scenario,
            durations=durations,
            failures=Failures(),
            horizon_s=min(scenario.horizon_s, steps * result.step_s.mean + result.rollout_s.p90),
        )
    )
    alone.run(progress)
    return summarize(alone).step_s.mean
