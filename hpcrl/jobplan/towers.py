"""Check of ``model.vision`` of a recipe against its start model: the parts that can be carried, and those that
exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.weights.read.towers import read_tower, uncarried_problem


def tower_problems(model_dir: Path, vision: str | None, *, weights: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the problems of a setting with a model directory, each with a hint; nothing where files are unreadable.

    Parameters
    ----------
    vision:
        ``model.vision`` of the recipe.
    weights:
        Whether the directory has to have weights.
    """
    if vision != "carry" or not weights:
        return
    try:
        tower = read_tower(model_dir)
    except (HpcrlError, OSError, ValueError):
        return
    if not tower:
        yield f"{model_dir} has no vision tower to carry", "leave model.vision out"
    elif what := uncarried_problem(tower):
        yield what, "set model.vision: drop"
