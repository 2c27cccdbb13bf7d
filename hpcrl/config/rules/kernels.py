"""Rules about kernels: those of a recipe are for the trainer's nodes, and for its dtype."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, trainer_needs_gpus

__all__ = ["KERNEL_RULES"]


def _kernels_fit(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer = recipe.trainer
    for name, value in trainer.kernels.model_dump().items():
        key = f"trainer.kernels.{name}"
        if value in ("auto", "reference"):
            continue
        if trainer.dtype != "bfloat16":
            yield key, f"{value} computes in half precision, and trainer.dtype is {trainer.dtype}"
        yield from trainer_needs_gpus(cluster, key, value)


KERNEL_RULES: tuple[Rule, ...] = (
    Rule(
        "kernels-fit",
        "Kernels of attention are for the trainer's nodes and dtype.",
        "leave trainer.kernels out, or set trainer.dtype: bfloat16 on nodes with GPUs",
        _kernels_fit,
    ),
)
