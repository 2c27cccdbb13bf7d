"""Rules about a teacher."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule


def _teacher_compares(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.algorithm.distillation is None:
        return
    temperature = recipe.rollouts.sampling.temperature
    if temperature != 1.0:
        what = f"is {temperature:g}, and a teacher gives log-probabilities at temperature 1"
        yield "rollouts.sampling.temperature", what
    if recipe.rollouts.zero_variance == "drop":
        yield "rollouts.zero_variance", "drops groups of equal rewards, although a teacher still scores their tokens"
    if recipe.sft is not None:
        yield "algorithm.distillation", "conversations are trained on as they are, and nothing is sampled"


def _teacher_is_read(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    distillation, reads = recipe.algorithm.distillation, "teacher" in recipe.algorithm.loss.needed
    if reads and distillation is None:
        yield "algorithm.loss.needs", "names the teacher, and there is no algorithm.distillation"
    if distillation is not None and distillation.coefficient == 0 and not reads:
        yield "algorithm.distillation.coefficient", "is 0, and the loss does not read the teacher"


DISTILLATION_RULES: tuple[Rule, ...] = (
    Rule(
        "teacher-is-read",
        "A teacher is asked for a loss that reads it, or for advantages.",
        "add algorithm.distillation with a coefficient, or remove it",
        _teacher_is_read,
    ),
    Rule(
        "teacher-compares",
        "The log-probabilities of policy and teacher can be compared, and all of them are used.",
        "set rollouts.sampling.temperature: 1.0 and rollouts.zero_variance: keep, or leave out algorithm.distillation",
        _teacher_compares,
    ),
)
