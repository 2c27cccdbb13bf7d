"""Whether ``model.vision`` of a recipe fits its start model: what can be carried, and what there is to carry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcrl.errors import HpcrlError
from hpcrl.weights.read.towers import read_tower, uncarried_problem

__all__ = ["tower_problems"]


def tower_problems(model_dir: Path, vision: str | None, *, weights: bool = True) -> Iterator[tuple[str, str]]:
    """Yield why a setting does not fit a model directory: what, and a hint; nothing where its files cannot be read.

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
