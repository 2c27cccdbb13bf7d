"""Rules about kernels: those of a recipe are for the trainer's nodes, and for its dtype."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, profile_variables, trainer_needs_gpus

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_EQUAL_EACH_TIME = (":4096:8", ":16:8")


def _kernels_fit(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer = recipe.trainer
    for name, value in trainer.kernels.model_dump().items():
        key = f"trainer.kernels.{name}"
        if value in ("auto", "reference"):
            continue
        if trainer.dtype != "bfloat16":
            yield key, f"{value} computes in half precision, and trainer.dtype is {trainer.dtype}"
        yield from trainer_needs_gpus(cluster, key, value)


def _deterministic_holds(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer = recipe.trainer
    if not trainer.deterministic:
        return
    if trainer.kernels.sparse_attention == "flash_mla_cudnn":
        yield "trainer.kernels.sparse_attention", "the backward pass of flash_mla_cudnn adds in the order of arrival"
    for key, value in profile_variables(cluster, ("trainer",), _WORKSPACE):
        if value not in _EQUAL_EACH_TIME:
            yield key, f"is {value!r}; a deterministic trainer needs {' or '.join(_EQUAL_EACH_TIME)}"


KERNEL_RULES: tuple[Rule, ...] = (
    Rule(
        "kernels-fit",
        "Attention kernels support the trainer's nodes and dtype.",
        "leave trainer.kernels out, or set trainer.dtype: bfloat16 on nodes with GPUs",
        _kernels_fit,
    ),
    Rule(
        "deterministic-holds",
        "A deterministic trainer uses only deterministic kernels and settings.",
        "take another kernel, leave CUBLAS_WORKSPACE_CONFIG to hpcrl, or leave trainer.deterministic out",
        _deterministic_holds,
    ),
)
