"""Nodes that the roles of a recipe request on a site, and the layout of the job that has them. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.layout import LayoutKind
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe


class Demand(NamedTuple):
    """Nodes that one role requests.

    Attributes
    ----------
    key:
        Section of the recipe that asks for them.
    nodes:
        Nodes of one replica.
    """

    role: Role
    key: str
    replicas: int
    nodes: int
    partition: str


def demands(recipe: Recipe, cluster: SlurmCluster) -> list[Demand]:
    """Return the nodes by role, the trainer first, because the supervisor runs on its first node.

    An evaluation has no trainer, and the engines come first.
    """
    wanted: list[tuple[Role, str, int, int]] = []
    if recipe.job.payload != "evaluation":
        wanted.append((Role.TRAINER, "trainer", 1, recipe.trainer.nodes))
    if recipe.sft is None:
        wanted += _serving_demands(recipe, cluster)
    return [Demand(*each, cluster.partition_name(each[0])) for each in wanted]


def _serving_demands(recipe: Recipe, cluster: SlurmCluster) -> Iterator[tuple[Role, str, int, int]]:
    engine, workers = recipe.engine, recipe.environment_workers
    if engine.placement == "apart" or engine.prefill is not None:
        for group in engine_groups(recipe):
            yield Role(group.role), group.key, group.replicas, group.nodes
    if cluster.orchestrator_apart:
        yield Role.ORCHESTRATOR, "orchestrator", 1, 1
    if workers is not None and workers.apart:
        yield Role.ENV, "environment_workers", workers.nodes, 1


class EngineGroup(NamedTuple):
    """Engines of one kind: the section of the recipe, their role, replicas, and nodes of one replica."""

    key: str
    role: str
    replicas: int
    nodes: int


def engine_groups(recipe: Recipe) -> list[EngineGroup]:
    """Return each kind of engines of a recipe; a supervised run has none."""
    engine = recipe.engine
    if recipe.sft is not None:
        return []
    sides = [
        (name, side) for name, side in (("prefill", engine.prefill), ("decode", engine.decode)) if side is not None
    ]
    groups = [EngineGroup(f"engine.{name}", name, side.replicas, side.nodes) for name, side in sides]
    return groups or [EngineGroup("engine", "engine", engine.replicas, engine.nodes)]


def choose_layout(recipe: Recipe, cluster: SlurmCluster) -> tuple[LayoutKind, str]:
    """Return the layout and the reason for it."""
    if recipe.job.layout != "auto":
        return recipe.job.layout, "the recipe says so"
    wanted = demands(recipe, cluster)
    if len(wanted) == 1 and (recipe.sft is not None or recipe.engine.shares_node):
        alone = recipe.sft is not None
        return "single", "a supervised run has a trainer alone" if alone else "trainer and engines share one node"
    if reason := _apart_reason(recipe, cluster, wanted):
        return "hetjob", reason
    if len({demand.replicas * demand.nodes for demand in wanted}) == 1:
        return "single", "all roles have as many nodes, of one partition"
    if not cluster.capabilities.hetjob:
        return "single", "the site has no heterogeneous jobs"
    return "hetjob", "roles differ in the number of nodes"


def _apart_reason(recipe: Recipe, cluster: SlurmCluster, wanted: Sequence[Demand]) -> str:
    """Return why roles cannot have nodes of one allocation; empty where they can."""
    if len({demand.partition for demand in wanted}) > 1:
        return "roles have different partitions"
    workers = recipe.environment_workers
    if workers is not None and workers.apart and workers.shares_nodes and cluster.capabilities.hetjob:
        return "workers of environments ask for parts of nodes"
    return ""
