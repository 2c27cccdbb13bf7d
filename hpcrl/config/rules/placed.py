"""Roles of a recipe that have nodes, as rules count them."""

from __future__ import annotations

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.recipe import Recipe


def engine_groups(recipe: Recipe) -> list[tuple[str, str, int, int]]:
    """Return key, role, replicas and nodes of one replica for each kind of engines."""
    engine = recipe.engine
    if recipe.sft is not None:
        return []
    sides = [("prefill", engine.prefill), ("decode", engine.decode)]
    groups = [(f"engine.{name}", name, side.replicas, side.nodes) for name, side in sides if side is not None]
    return groups or [("engine", "engine", engine.replicas, engine.nodes)]


def placed_groups(recipe: Recipe, cluster: SlurmCluster) -> list[tuple[str, str, int, int]]:
    """Return key, role, replicas and nodes of one replica for each role that has nodes."""
    engines = engine_groups(recipe) if recipe.engine.placement == "apart" else []
    groups = [("trainer", "trainer", 1, recipe.trainer.nodes), *engines]
    apart = cluster.orchestrator_apart and recipe.sft is None
    if apart:
        groups.append(("orchestrator", "orchestrator", 1, 1))
    if recipe.environment_workers is not None and recipe.environment_workers.apart and recipe.sft is None:
        groups.append(("environment_workers", "env", recipe.environment_workers.nodes, 1))
    return groups
