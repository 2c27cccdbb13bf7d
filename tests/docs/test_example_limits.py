"""Recipes of docs/examples: programs have time on a busy machine, and pages show the recipes as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "docs/examples").rglob("recipe.yaml"))
LEAST_S = 600.0
"""Programs of 32 rollouts import their packages at once: each takes seconds of a processor and waits for the others."""


def environments_of(recipe: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(recipe.read_text(encoding="utf-8")).get("environments", [])
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.parent.name)
def test_programs_and_their_judges_have_time_on_a_busy_machine(recipe: Path) -> None:
    for environment in environments_of(recipe):
        if environment["kind"] not in ("harness", "verifiers"):
            continue
        assert environment["time_limit_s"] >= LEAST_S
        assert all(reward.get("timeout_s", LEAST_S) >= LEAST_S for reward in environment.get("rewards", []))


@pytest.mark.parametrize("name", ["harness", "verifiers"])
def test_the_page_shows_the_environment_of_the_recipe(name: str) -> None:
    recipe = (ROOT / "docs/examples" / name / "recipe.yaml").read_text(encoding="utf-8")
    shown = recipe[recipe.index("environments:") :]
    assert f"```yaml\n{shown}```\n" in (ROOT / "docs/environments.md").read_text(encoding="utf-8")
