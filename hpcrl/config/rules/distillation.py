"""Rules about a teacher."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule

__all__ = ["DISTILLATION_RULES"]


def _teacher_compares(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.algorithm.distillation is None:
        return
    temperature = recipe.rollouts.sampling.temperature
    if temperature != 1.0:
        what = f"is {temperature:g}, and a teacher gives log-probabilities at temperature 1"
        yield "rollouts.sampling.temperature", what
    if recipe.rollouts.zero_variance == "drop":
        yield "rollouts.zero_variance", "drops groups of equal rewards, in which a teacher still tells tokens apart"
    if recipe.sft is not None:
        yield "algorithm.distillation", "conversations are trained on as they are, and nothing is sampled"


DISTILLATION_RULES: tuple[Rule, ...] = (
    Rule(
        "teacher-compares",
        "The log-probabilities of policy and teacher can be compared, and all of them are used.",
        "set rollouts.sampling.temperature: 1.0 and rollouts.zero_variance: keep, or leave out algorithm.distillation",
        _teacher_compares,
    ),
)
