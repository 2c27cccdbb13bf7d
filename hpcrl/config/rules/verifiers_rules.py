"""Rules of environments of verifiers."""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule
from hpcrl.config.verifiers_environment import VerifiersEnv


def _environments(recipe: Recipe) -> Iterator[tuple[str, VerifiersEnv]]:
    """Yield each environment of this kind with its key."""
    for number, environment in enumerate(recipe.environments):
        if isinstance(environment, VerifiersEnv):
            yield f"environments.{number}", environment


def _has_one_package(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _environments(recipe):
        if (config.package is None) == (config.path is None):
            found = "neither package nor path is given" if config.path is None else "package and path are given"
            yield f"{key}.package", found


def _time_of_rollouts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for key, config in _environments(recipe):
        if config.turn_timeout_s <= config.time_limit_s:
            limits = f"{config.turn_timeout_s:g} s, and time_limit_s is {config.time_limit_s:g} s"
            yield f"{key}.turn_timeout_s", f"a rollout may take {limits}"


VERIFIERS_RULES: tuple[Rule, ...] = (
    Rule(
        "verifiers-package",
        "An environment of verifiers is one package.",
        "give either package or path",
        _has_one_package,
    ),
    Rule(
        "verifiers-time",
        "The timeout of a rollout is longer than its time limit.",
        "raise turn_timeout_s above time_limit_s",
        _time_of_rollouts,
    ),
)
