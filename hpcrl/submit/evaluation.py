"""From a recipe to a run that only evaluates: engines, and no trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.environments import trained_on
from hpcrl.config.load import load_recipe
from hpcrl.config.recipe import Recipe
from hpcrl.config.resources import find_recipe
from hpcrl.errors import ConfigError
from hpcrl.jobplan import default_run_name

_SET = "eval"


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Selection of an evaluation of a recipe; None: the value of the recipe.

    Attributes
    ----------
    environments:
        Names; empty: all of them.
    temperature:
        By default that of ``evaluation.sampling``; where that is greedy, several samples have that of training.
    """

    samples: int = 1
    prompts: int | None = None
    temperature: float | None = None
    environments: tuple[str, ...] = ()
    pass_reward: float = 1.0
    seed: int | None = None


def is_model(text: str) -> bool:
    """Return whether a text names the directory of a model."""
    return Path(text).is_dir() and (Path(text) / "config.json").is_file()


def is_recipe(text: str) -> bool:
    """Return whether a text names a recipe: a file, or a packaged one."""
    try:
        find_recipe(text)
    except ConfigError:
        return Path(text).suffix in (".yaml", ".yml")
    return True


def evaluation_settings(recipe: str, overrides: Sequence[str], request: EvaluationRequest) -> list[str]:
    """Return settings (``--set``) that make of a recipe one that only evaluates.

    Raises
    ------
    ConfigError
        The recipe cannot be read.
    """
    value = load_recipe(recipe, overrides).value
    settings = ["job.payload=evaluation", f"evaluation.sets={json.dumps([evaluation_set(value, request)])}"]
    if request.seed is not None:
        settings.append(f"seed={request.seed}")
    return settings + _own_nodes(value)


def evaluation_set(recipe: Recipe, request: EvaluationRequest) -> dict[str, Any]:
    """Return the set of held-out prompts that a request is for, as a recipe has it."""
    chosen = len(request.environments or trained_on(recipe.environments))
    own = recipe.evaluation.sampling.temperature
    usual = own if own > 0 or request.samples == 1 else recipe.rollouts.sampling.temperature
    return {
        "name": _SET,
        "environments": list(request.environments) or None,
        "prompts": max(recipe.evaluation.prompts, chosen) if request.prompts is None else request.prompts,
        "samples": request.samples,
        "sampling": {"temperature": usual if request.temperature is None else request.temperature},
        "pass_reward": request.pass_reward,
    }


def _own_nodes(recipe: Recipe) -> list[str]:
    """Return settings against shared nodes and later engines, because an evaluation has no trainer."""
    found = [] if recipe.engine.placement == "apart" else ["engine.placement=apart"]
    if recipe.job.layout == "elastic":
        found += ["job.layout=auto", "job.min_replicas=1"]
    return found


def evaluation_name(recipe: Recipe) -> str:
    """Return the name of a run that evaluates, by the recipe and the time."""
    return default_run_name(recipe.model_copy(update={"name": f"{recipe.name[:30]}-eval"}), time.time())
