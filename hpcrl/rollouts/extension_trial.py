"""Try extensions of the orchestrator before a run: ``python -m hpcrl.rollouts.extension_trial < recipe.json``.

It prints one JSON document with ``findings`` (``key``, ``what`` and ``hint`` of each extension that cannot be used).
`hpcrl.jobplan.extension_trial` calls it with the interpreter of the orchestrator. Environments have a trial of their
own (`hpcrl.rollouts.environments.trial`).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.algorithm import CustomAdvantageConfig
from hpcrl.config.recipe import Recipe
from hpcrl.extend import ExtensionError
from hpcrl.rollouts.batches.advantages import custom_advantages


def find_problems(recipe: Recipe) -> list[dict[str, str]]:
    """Try the extensions that the recipe names, all of them also where one fails."""
    config, size = recipe.algorithm.advantage, recipe.rollouts.group_size
    if not (isinstance(config, CustomAdvantageConfig) and config.try_before_submit):
        return []
    # a group whose rewards differ, one of equal rewards, and one of which rollouts were dropped
    groups = (np.linspace(0.0, 1.0, size), np.full(size, 0.5), np.array([0.0, 1.0]))
    try:
        for rewards in groups:
            custom_advantages(rewards, np.arange(1, len(rewards) + 1, dtype=np.int64), config)
    except ExtensionError as error:
        return [{"key": "algorithm.advantage", "what": error.what, "hint": error.hint}]
    return []


def main() -> None:
    """Read a recipe from the standard input and print the answer."""
    answer, sys.stdout = sys.stdout.buffer, sys.stderr  # extensions may print
    request: dict[str, Any] = msgspec.json.decode(sys.stdin.buffer.read())
    recipe = Recipe.model_validate_json(msgspec.json.encode(request["recipe"]))
    answer.write(msgspec.json.encode({"findings": find_problems(recipe)}) + b"\n")


if __name__ == "__main__":
    main()
