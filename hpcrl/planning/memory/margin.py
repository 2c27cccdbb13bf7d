"""Margins of the assumptions about memory until a plan no longer fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.models.facts import ModelFacts
from hpcrl.planning.hardware import node_hardware
from hpcrl.planning.memory.fit import trainer_memory
from hpcrl.planning.memory.settings import EXPERT_IMBALANCE
from hpcrl.planning.memory.trainer import trainer_peak

_BISECTIONS = 12
"""To a thousandth of the range."""


@dataclass(frozen=True, slots=True)
class ExpertMargin:
    """Tokens of the busiest rank of expert parallelism relative to the mean.

    Attributes
    ----------
    planned:
        Value of the plan (assumed).
    most:
        All tokens on one rank: the degree of expert parallelism.
    overflows:
        Above it the trainer's GPUs overflow; None: not even at ``most``; below 1: also where experts are even.
    """

    planned: float
    most: float
    overflows: float | None

    def document(self) -> Mapping[str, float | None]:
        """Give the margin as a JSON document."""
        return {"planned": self.planned, "most": self.most, "overflows_above": self.overflows}

    def __str__(self) -> str:
        planned = f"planned with {self.planned:g}, assumed"
        if self.overflows is None:
            return f"the trainer's GPUs hold all tokens on one rank ({planned})"
        if self.overflows < 1:
            return f"the trainer's GPUs overflow even with perfectly balanced experts ({planned})"
        return (
            f"the trainer's GPUs overflow where one rank gets more than {self.overflows:.2f} times the mean of tokens "
            f"({planned})"
        )


def expert_margin(recipe: Recipe, cluster: ClusterProfile, facts: ModelFacts) -> ExpertMargin | None:
    """Return the margin of a recipe; None where experts are on every rank, or the trainer has no GPUs.

    Raises
    ------
    ConfigError
        The profile lacks the memory of a GPU.
    """
    ep = recipe.trainer.parallelism.ep
    if not isinstance(cluster, SlurmCluster) or ep == 1 or not facts.num_experts:
        return None
    node = node_hardware(cluster, Role.TRAINER)
    if not node.gpus:
        return None
    memory = trainer_memory(recipe, device="cuda")

    def fits(imbalance: float) -> bool:
        return trainer_peak(facts, replace(memory, expert_imbalance=imbalance)).total <= node.gpu_bytes

    most = float(ep)
    if fits(most):
        return ExpertMargin(EXPERT_IMBALANCE, most, None)
    low, high = 0.0, most
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return ExpertMargin(EXPERT_IMBALANCE, most, low)
