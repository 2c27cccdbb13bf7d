"""Division of nodes among the jobs of role groups: hetjob, single or elastic. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from hpcrl.config.cluster import SlurmCluster
from hpcrl.config.engine_shape import engine_gpus
from hpcrl.config.layout import JobComponent, Layout
from hpcrl.config.node_demands import choose_layout, demands
from hpcrl.config.plan import NodeShare, Role, RoleGroup
from hpcrl.config.recipe import Recipe


def place_groups(groups: Sequence[RoleGroup], recipe: Recipe, cluster: SlurmCluster) -> tuple[Layout, list[RoleGroup]]:
    """Return the jobs of a run, and its groups with the place of their nodes.

    Groups without their own nodes (the orchestrator, unless it is placed separately) stay at their default: on the
    first node of the first component, with the trainer.
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
        spares = sum(recipe.job.spares_of(demand.role.value) for demand in wanted)
        # nodes of a replica stay together: the segment must divide every replica's share
        unit = gcd(*(demand.nodes for demand in wanted), spares)
        component = _component(cluster, wanted[0].partition, roles, nodes=total, jobs=1, unit=unit)
        components.append(component.model_copy(update={"spares": spares}))
    else:
        for index, demand in enumerate(wanted):
            places[demand.role] = (index, 0)
            own_jobs = kind == "elastic" and demand.role is not Role.TRAINER
            nodes = demand.nodes if own_jobs else demand.replicas * demand.nodes
            jobs = demand.replicas if own_jobs else 1
            roles = (demand.role.value,)
            spares = 0 if own_jobs else recipe.job.spares_of(demand.role.value)
            # Slurm refuses a segment that does not divide the nodes of the job
            unit = gcd(demand.nodes, spares)
            component = _component(cluster, demand.partition, roles, nodes=nodes, jobs=jobs, unit=unit)
            component = component.model_copy(update={"spares": spares})
            components.append(_of_workers(component, recipe) if demand.role is Role.ENV else component)
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
    placed = [_with_worker_share(group, recipe, components) for group in placed]
    options = recipe.job.sbatch_options
    return Layout(kind=kind, reason=reason, components=tuple(components), sbatch_options=options), placed


_UNSHARED = 1 / 8
"""Share of a shared node's CPUs that steps do not get: for roles on the node, and for CPUs that a site reserves
(``CoreSpecCount``)."""


def _shares(
    recipe: Recipe, cluster: SlurmCluster, groups: Sequence[RoleGroup], node: JobComponent
) -> dict[Role, NodeShare]:
    """Return the shares of trainer and engines in their common node: equal CPUs for each rank, and a GPU or none.

    On the same GPUs both have all CPUs, too: Slurm gives a step parts of a node alone, or lets it share everything.
    """
    if recipe.engine.shares_gpus and node.gpus_per_node:
        gpus = engine_gpus(recipe, cluster, Role.ENGINE)
        return {
            Role.TRAINER: NodeShare(cpus=node.cpus, gpus=recipe.trainer.ranks, same=True),
            Role.ENGINE: NodeShare(cpus=node.cpus, gpus=gpus, same=True),
        }
    ranks = {group.role: group.ranks for group in groups}
    trainer, engine = ranks[Role.TRAINER], ranks[Role.ENGINE]
    cpus = max(1, int(node.cpus * (1 - _UNSHARED)) // (trainer + recipe.engine.replicas * engine))
    # Slurm allocates whole cores, which have two CPUs where they have threads
    cpus -= cpus % 2 if cpus > 1 else 0
    first, gpus = min(trainer, node.gpus_per_node), engine_gpus(recipe, cluster, Role.ENGINE)
    return {
        Role.TRAINER: NodeShare(cpus=cpus * trainer, gpus=first),
        Role.ENGINE: NodeShare(cpus=cpus * engine, gpus=gpus, first_gpu=first),
    }


def _of_workers(component: JobComponent, recipe: Recipe) -> JobComponent:
    """Return the component of workers of environments: without GPUs, and with parts of nodes where they want parts."""
    workers = recipe.environment_workers
    assert workers is not None
    changes: dict[str, object] = {"gpus_per_node": 0, "gpu_type": None}
    if workers.cpus is not None and workers.memory_gib is not None:
        changes["exclusive"] = False
        changes["cpus"] = workers.cpus * workers.per_node
        changes["memory_gib"] = workers.memory_gib * workers.per_node
    return component.model_copy(update=changes)


def _with_worker_share(group: RoleGroup, recipe: Recipe, components: Sequence[JobComponent]) -> RoleGroup:
    """Return the group; workers of environments have a share of a node each, where it is not all theirs."""
    workers = recipe.environment_workers
    if group.role is not Role.ENV or workers is None or not workers.apart:
        return group
    component = components[group.component]
    # in one allocation with other roles the node has GPUs, which the step of a worker does not take
    if workers.per_node == 1 and not workers.shares_nodes and not component.gpus_per_node:
        return group
    cpus = workers.cpus or max(1, component.cpus // workers.per_node)
    share = NodeShare(cpus=cpus, gpus=0, memory_gib=workers.memory_gib)
    return group.model_copy(update={"share": share})


def _after_replicas(group: RoleGroup, inference: tuple[Role, ...]) -> RoleGroup:
    """Return the group; the trainer starts after the engines, whose jobs may wait in the queue for hours."""
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
    """Return the largest divisor of ``unit`` that fits into a block: Slurm requires segments of equal size."""
    return next(size for size in range(min(unit, block_nodes), 0, -1) if unit % size == 0)
