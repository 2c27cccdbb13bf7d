"""How role groups share nodes out among jobs: hetjob, single or elastic. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.engine_shape import engine_gpus
from hpcrl.config.layout import JobComponent, Layout, LayoutKind
from hpcrl.config.plan import NodeShare, Role, RoleGroup
from hpcrl.config.recipe import Recipe

__all__ = ["Demand", "choose_layout", "demands", "place_groups"]


class Demand(NamedTuple):
    """What one role asks for."""

    role: Role
    replicas: int
    nodes: int
    """Nodes of one replica."""
    partition: str


def demands(recipe: Recipe, cluster: SlurmCluster) -> list[Demand]:
    """Nodes by role, the trainer first: its first node is the one that the supervisor runs on. An evaluation has no
    trainer, and the engines come first."""
    engine = recipe.engine
    wanted = [] if recipe.job.payload == "evaluation" else [(Role.TRAINER, 1, recipe.trainer.nodes)]
    if recipe.sft is not None:
        return [Demand(role, replicas, nodes, cluster.partition_name(role)) for role, replicas, nodes in wanted]
    if engine.prefill is None and engine.decode is None and engine.placement == "apart":
        wanted.append((Role.ENGINE, engine.replicas, engine.nodes))
    for role, group in ((Role.PREFILL, engine.prefill), (Role.DECODE, engine.decode)):
        if group is not None:
            wanted.append((role, group.replicas, group.nodes))
    if cluster.orchestrator_apart:
        wanted.append((Role.ORCHESTRATOR, 1, 1))
    return [Demand(role, replicas, nodes, cluster.partition_name(role)) for role, replicas, nodes in wanted]


def choose_layout(recipe: Recipe, cluster: SlurmCluster) -> tuple[LayoutKind, str]:
    """The layout and why."""
    if recipe.job.layout != "auto":
        return recipe.job.layout, "the recipe says so"
    wanted = demands(recipe, cluster)
    if len(wanted) == 1 and (recipe.sft is not None or recipe.engine.shares_node):
        alone = recipe.sft is not None
        return "single", "a supervised run has a trainer alone" if alone else "trainer and engines share one node"
    if len({demand.partition for demand in wanted}) > 1:
        return "hetjob", "roles have different partitions"
    if len({demand.replicas * demand.nodes for demand in wanted}) == 1:
        return "single", "all roles have as many nodes, of one partition"
    if not cluster.capabilities.hetjob:
        return "single", "the site has no heterogeneous jobs"
    return "hetjob", "roles differ in the number of nodes"


def place_groups(groups: Sequence[RoleGroup], recipe: Recipe, cluster: SlurmCluster) -> tuple[Layout, list[RoleGroup]]:
    """The jobs of a run, and its groups with the place of their nodes.

    Groups without nodes of their own (the orchestrator, unless it is placed apart) stay where their default is: on the
    first node of the first component, beside the trainer.
    """
    kind, reason = choose_layout(recipe, cluster)
    wanted = demands(recipe, cluster)
    components: list[JobComponent] = []
    places: dict[Role, tuple[int, int]] = {}
    if kind == "single":
        total = 0
        for demand in wanted:
            places[demand.role] = (0, total)
            total += demand.replicas * demand.nodes
        roles = tuple(demand.role.value for demand in wanted)
        # nodes of a replica stay together: the segment must divide every replica's share
        unit = gcd(*(demand.nodes for demand in wanted))
        components.append(_component(cluster, wanted[0].partition, roles, nodes=total, jobs=1, unit=unit))
    else:
        for index, demand in enumerate(wanted):
            places[demand.role] = (index, 0)
            own_jobs = kind == "elastic" and demand.role is not Role.TRAINER
            nodes = demand.nodes if own_jobs else demand.replicas * demand.nodes
            jobs = demand.replicas if own_jobs else 1
            roles = (demand.role.value,)
            components.append(_component(cluster, demand.partition, roles, nodes=nodes, jobs=jobs, unit=demand.nodes))
    placed = [
        group.model_copy(update=dict(zip(("component", "first_node"), places[group.role], strict=True)))
        if group.role in places
        else group
        for group in groups
    ]
    if kind == "elastic":
        placed = [_after_replicas(group, tuple(demand.role for demand in wanted[1:])) for group in placed]
    if recipe.engine.shares_node:
        components[0] = components[0].model_copy(update={"roles": (*components[0].roles, Role.ENGINE.value)})
        shares = _shares(recipe, cluster, placed, components[0])
        placed = [group.model_copy(update={"share": shares.get(group.role)}) for group in placed]
    options = recipe.job.sbatch_options
    return Layout(kind=kind, reason=reason, components=tuple(components), sbatch_options=options), placed


_UNSHARED = 1 / 8
"""CPUs of a shared node that no step has for itself: for roles beside, and for what a site keeps of its nodes
(``CoreSpecCount``)."""


def _shares(
    recipe: Recipe, cluster: SlurmCluster, groups: Sequence[RoleGroup], node: JobComponent
) -> dict[Role, NodeShare]:
    """What trainer and engines have of the node that they share: for each rank as many CPUs, and a GPU or none."""
    ranks = {group.role: group.ranks for group in groups}
    trainer, engine = ranks[Role.TRAINER], ranks[Role.ENGINE]
    cpus = max(1, int(node.cpus * (1 - _UNSHARED)) // (trainer + recipe.engine.replicas * engine))
    # Slurm gives whole cores, which have two CPUs where they have threads
    cpus -= cpus % 2 if cpus > 1 else 0
    first, gpus = min(trainer, node.gpus_per_node), engine_gpus(recipe, cluster, Role.ENGINE)
    return {
        Role.TRAINER: NodeShare(cpus=cpus * trainer, gpus=first),
        Role.ENGINE: NodeShare(cpus=cpus * engine, gpus=gpus, first_gpu=first),
    }


def _after_replicas(group: RoleGroup, inference: tuple[Role, ...]) -> RoleGroup:
    """Jobs of replicas may wait in the queue for hours: the trainer does not start into a run that has none."""
    return group.model_copy(update={"after": inference}) if group.role is Role.TRAINER else group


def _component(
    cluster: SlurmCluster, partition_name: str, roles: tuple[str, ...], *, nodes: int, jobs: int, unit: int
) -> JobComponent:
    partition = cluster.partitions[partition_name]
    node = partition.node
    return JobComponent(
        roles=roles,
        nodes=nodes,
        jobs=jobs,
        partition=partition_name,
        account=partition.account,
        qos=partition.qos,
        reservation=partition.reservation,
        constraint=partition.constraint,
        # whole nodes: roles of different runs on one node would share its network and its page cache
        gpus_per_node=node.gpus,
        gpu_type=node.gpu_type,
        gres=cluster.gres,
        exclusive=cluster.capabilities.exclusive,
        cpus=node.cpus,
        memory_gib=node.memory_gib,
        segment=None if partition.block_nodes is None else _segment(unit, partition.block_nodes),
    )


def _segment(unit: int, block_nodes: int) -> int:
    """The largest divisor of ``unit`` that fits into a block: Slurm wants segments of equal size."""
    return next(size for size in range(min(unit, block_nodes), 0, -1) if unit % size == 0)
