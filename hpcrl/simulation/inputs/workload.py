"""Turns of rollouts, drawn from the durations."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from random import Random

from hpcrl.config.environments import trained_on
from hpcrl.config.recipe import Recipe
from hpcrl.planning.distributions import drawer, tail_of
from hpcrl.simulation.inputs.durations import Durations, EnvironmentDurations, TurnPlan

Trajectory = tuple[tuple[TurnPlan, ...], float]
"""Turns, and seconds from the last reply to the reward."""


class TrajectoryDraws:
    """Draws trajectories.

    Attributes
    ----------
    tool_slots:
        By environment: tool calls that can run at once, or None; in the recipe's size.
    """

    def __init__(self, recipe: Recipe, durations: Durations, rng: Random) -> None:
        self._rng = rng
        trained = trained_on(recipe.environments)
        self._weights = list(accumulate(environment.weight for environment in trained))
        self._groups: list[Callable[[], Callable[[], Trajectory]]] = []
        self._latency = []
        self.tool_slots: list[int | None] = []
        for environment in trained:
            found = durations.environment(environment.name)
            self._groups.append(self._trace(found) if found.trace else self._drawn(found))
            self.tool_slots.append(found.tool_slots)
            wait = environment.latency
            self._latency.append(drawer(tail_of(wait), rng) if wait.median_s else None)

    def environment(self) -> int:
        """Return the index of the environment of a new group."""
        return bisect(self._weights, self._rng.random() * self._weights[-1])

    def group(self, environment: int) -> Callable[[], Trajectory]:
        """Return a function that draws the members of a new group."""
        return self._groups[environment]()

    def latency_s(self, environment: int) -> float:
        """Return the recipe's extra wait of one training rollout, in seconds."""
        draw = self._latency[environment]
        return 0.0 if draw is None else draw()

    def _trace(self, durations: EnvironmentDurations) -> Callable[[], Callable[[], Trajectory]]:
        recorded = [(rollout.turns, rollout.judge_s) for rollout in durations.trace]
        uniform, count = self._rng.random, len(recorded)

        def draw() -> Trajectory:
            return recorded[int(uniform() * count)]

        return lambda: draw

    def _drawn(self, durations: EnvironmentDurations) -> Callable[[], Callable[[], Trajectory]]:
        assert durations.turns is not None
        assert durations.prompt_tokens is not None
        assert durations.sampled_tokens is not None
        turns, prompt = drawer(durations.turns, self._rng), drawer(durations.prompt_tokens, self._rng)
        sampled, said = drawer(durations.sampled_tokens, self._rng), drawer(durations.said_tokens, self._rng)
        tool, judge = drawer(durations.tool_s, self._rng), drawer(durations.judge_s, self._rng)

        def group() -> Callable[[], Trajectory]:
            prompt_tokens = max(1, round(prompt()))

            def member() -> Trajectory:
                first = TurnPlan(0.0, prompt_tokens, max(1, round(sampled())))
                later = (
                    TurnPlan(tool(), round(said()), max(1, round(sampled()))) for _ in range(max(1, round(turns())) - 1)
                )
                return (first, *later), judge()

            return member

        return group
