"""What can be checked about a run's inputs before anything is started."""

from __future__ import annotations

from pathlib import Path

from hpcrl.config.load import Loaded
from hpcrl.config.recipe import Recipe
from hpcrl.errors import ConfigError, Finding
from hpcrl.models import load_arch

__all__ = ["check_model"]


def check_model(recipe: Loaded[Recipe], model_dir: Path) -> None:
    """Check the start model (ConfigError where it is missing or does not fit the recipe).

    Parameters
    ----------
    recipe:
        The recipe as loaded.
    model_dir:
        ``model.path``, absolute.
    """
    where = recipe.where("model.path")
    if not (model_dir / "config.json").is_file():
        way_out = (
            f"make it: hpcrl warmup {recipe.source}"
            if recipe.value.model.warmup is not None
            else "give the path of a Hugging Face model directory"
        )
        raise ConfigError([Finding(where, "model.path", f"{model_dir} holds no model (no config.json)", way_out)])
    try:
        arch = load_arch(model_dir)
    except ValueError as error:
        raise ConfigError([Finding(where, "model.path", str(error), "choose a Qwen3-MoE model")]) from error
    if recipe.value.engine.max_model_len > arch.max_position_embeddings:
        raise ConfigError(
            [
                Finding(
                    recipe.where("engine.max_model_len"),
                    "engine.max_model_len",
                    f"{recipe.value.engine.max_model_len} is more than the {arch.max_position_embeddings} positions "
                    f"of {model_dir}",
                    "lower it, or choose a model with more positions",
                )
            ]
        )
