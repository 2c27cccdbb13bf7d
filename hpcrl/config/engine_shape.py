"""Engines by role: nodes and GPUs of a replica, limits of its steps, and the flags of vLLM that each is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine import EngineConfig, EngineGroupConfig
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe


class StepLimits(NamedTuple):
    """Limits of one step of an engine's rank."""

    max_num_seqs: int
    max_num_batched_tokens: int


def engine_side(engine: EngineConfig, role: Role) -> EngineGroupConfig | None:
    """Return the settings of one side of disaggregated serving; None where engines are of one kind."""
    return {Role.PREFILL: engine.prefill, Role.DECODE: engine.decode}.get(role)


def step_limits(engine: EngineConfig, role: Role) -> StepLimits:
    """Return the limits of a step of a role's engines: those of its side, or where it names none of all engines.

    Engines that are not disaggregated decode too: asked for ``decode`` they answer for themselves.
    """
    side = engine_side(engine, role)
    return StepLimits(
        (side and side.max_num_seqs) or engine.max_num_seqs,
        (side and side.max_num_batched_tokens) or engine.max_num_batched_tokens,
    )


def replica_nodes(recipe: Recipe) -> dict[Role, int]:
    """Return the nodes of a replica of each role that engines have."""
    engine = recipe.engine
    sides = [(Role.PREFILL, engine.prefill), (Role.DECODE, engine.decode)]
    return {role: side.nodes for role, side in sides if side is not None} or {Role.ENGINE: engine.nodes}


def engine_gpus(recipe: Recipe, cluster: ClusterProfile, role: Role) -> int:
    """Return the GPUs that an engine uses on each node; a local run's are not known, and not needed.

    On the trainer's node engines have what its ranks leave (the rule ``shared-node-parts`` says that there is
    something), or divide the GPUs of its ranks.
    """
    if recipe.engine.backend == "embedded" or recipe.engine.device == "cpu" or not isinstance(cluster, SlurmCluster):
        return 0
    gpus = cluster.partitions[cluster.partition_name(role)].node.gpus
    if recipe.engine.shares_gpus:
        return min(gpus, recipe.trainer.ranks) // recipe.engine.replicas
    if recipe.engine.shares_node:
        return max(0, gpus - recipe.trainer.ranks) // recipe.engine.replicas
    return gpus


def engine_ranks_per_node(recipe: Recipe, cluster: ClusterProfile, role: Role) -> int:
    """Return the ranks of an engine on each of its nodes: its GPUs; 1 without."""
    return max(1, engine_gpus(recipe, cluster, role))


def vllm_args(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    """Yield the flags of vLLM that the recipe sets for all engines or for one side: its key, the flag and the value."""
    engine = recipe.engine
    sides = [("engine", engine), ("engine.prefill", engine.prefill), ("engine.decode", engine.decode)]
    for key, side in sides:
        if side is not None:
            yield from ((f"{key}.vllm_args.{flag}", flag, value) for flag, value in side.vllm_args.items())


def vllm_flag(recipe: Recipe, name: str) -> list[tuple[str, Any]]:
    """Return the key and value of a flag of vLLM, wherever the recipe gives it: to all engines or to one side."""
    return [(key, value) for key, flag, value in vllm_args(recipe) if flag == name]
