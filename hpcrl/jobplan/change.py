"""Changing the recipe of a run between two attempts: what its checkpoints allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from hpcrl.config.load import Loaded, leaves, load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.config.sampling import SamplingConfig
from hpcrl.errors import ConfigError, Finding

#: what the numbers in a checkpoint mean: with another value they would mean something else
_FIXED = ("name", "seed", "model", "rollouts.group_size", "sft")
#: settings of `sft` that no number in a checkpoint depends on
_FREE_OF_SFT = ("epochs", "evaluate_every_steps", "check_before_submit", "check_timeout_s")
#: what the recipe's job says instead of the site (`hpcrl.config.joined`)
_CHARGES = ("job.account", "job.qos", "job.reservation", "job.partition")


def change_recipe(recipe_path: Path, overrides: Sequence[str]) -> tuple[Loaded[Recipe], list[str]]:
    """Return the recipe of a run with ``overrides``, and a line for each value that differs.

    The number of trainer ranks, engines, staleness, learning rate, hand-offs, checkpoints and so on may change.
    Environments may be added, and get other weights.

    Raises
    ------
    ConfigError
        An override is wrong, or changes a value that the checkpoints of the run, or the samples of an evaluation,
        depend on.
    """
    old, new = load_recipe(str(recipe_path)), load_recipe(str(recipe_path), overrides)
    # the prompts of an evaluation are divided among its environments
    fixed = (*_FIXED, "environments") if new.value.job.payload == "evaluation" else _FIXED
    wrong = [key for key in fixed if _value(old.value, key) != _value(new.value, key)]
    if wrong:
        hint = "submit a new run; hpcrl checkpoint export gives it the weights of this one"
        raise ConfigError([Finding("--set", key, "cannot change in a run that has checkpoints", hint) for key in wrong])
    if found := list(_changed_environments(old.value, new.value)):
        raise ConfigError(found)
    if new.value.job.payload == "evaluation" and _drawn(old.value) != _drawn(new.value):
        what = "cannot change in an evaluation: samples that are done were drawn as it was"
        raise ConfigError([Finding("--set", "evaluation.sampling", what, "start another one: hpcrl eval")])
    if gone := [key for key in _CHARGES if _taken_back(_value(old.value, key), _value(new.value, key))]:
        what, hint = "cannot be undone: the run keeps it in its profile", "give the value that you want"
        raise ConfigError([Finding("--set", key, what, hint) for key in gone])
    before, after = (dict(leaves(loaded.value)) for loaded in (old, new))
    changes = [
        f"{'.'.join(map(str, path))}: {before.get(path)} -> {after.get(path)}"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]
    return new, changes


def _changed_environments(old: Recipe, new: Recipe) -> Iterator[Finding]:
    """Yield environments that are gone, or that differ by more than their weight: groups of them may have started."""
    there = {each.name: each for each in new.environments}
    for each in old.environments:
        key, other = f"environments.{each.name}", there.get(each.name)
        if other is None:
            hint = "keep it with a very small weight (1e-9): started groups are trained, and hardly any new one starts"
            yield Finding("--set", key, "cannot be removed from a run that has checkpoints", hint)
        elif each.model_dump(exclude={"weight"}) != other.model_dump(exclude={"weight"}):
            hint = "change its weight alone, add another environment, or submit a new run"
            yield Finding("--set", key, "cannot change in a run that has checkpoints, except for its weight", hint)


def _drawn(recipe: Recipe) -> list[SamplingConfig]:
    """Return how tokens of each set of held-out prompts are drawn."""
    evaluation = recipe.evaluation
    return [each.sampled(evaluation.sampling).beside(recipe.rollouts.sampling) for each in evaluation.sets]


def _taken_back(old: Any, new: Any) -> bool:
    """Return whether a value of the job, or that of a role, was removed."""
    return old is not None and (
        new is None or (isinstance(old, dict) and isinstance(new, dict) and not old.keys() <= new.keys())
    )


def _value(recipe: Recipe, key: str) -> Any:
    if key == "sft" and recipe.sft is not None:
        return recipe.sft.model_dump(exclude=set(_FREE_OF_SFT))
    return reduce(getattr, key.split("."), recipe)
