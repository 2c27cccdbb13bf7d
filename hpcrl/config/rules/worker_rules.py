"""Rules about workers of environments."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, on_slurm

_KEY = "environment_workers"


def _has_rollouts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.environment_workers is not None and recipe.sft is not None:
        yield _KEY, "a supervised run (sft) has no environments"


def _not_elastic(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    workers = recipe.environment_workers
    if workers is not None and workers.apart and recipe.job.layout == "elastic":
        what = "in the layout elastic, nodes other than the trainer's are jobs of engines, which come and go"
        yield f"{_KEY}.placement", what


def _shape(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    workers = recipe.environment_workers
    if workers is None:
        return
    parts = {"cpus": workers.cpus, "memory_gib": workers.memory_gib}
    given = [name for name, value in parts.items() if value is not None]
    if not workers.apart:
        for name in [*given, *(["per_node"] if workers.per_node > 1 else [])]:
            yield f"{_KEY}.{name}", "has no effect for workers on the trainer's first node"
    elif len(given) == 1:
        (missing,) = set(parts) - set(given)
        yield f"{_KEY}.{given[0]}", f"is given without {missing}: a worker's part of a node has both"
    if workers.apart and workers.per_node > workers.count:
        yield f"{_KEY}.per_node", f"{workers.per_node} is more than count, which is {workers.count}"


@on_slurm
def _fits_node(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    workers = recipe.environment_workers
    if workers is None or not workers.apart:
        return
    partition = cluster.partition_name("env")
    node, each = cluster.partitions[partition].node, workers.per_node
    if workers.cpus is not None and workers.cpus * each > node.cpus:
        what = f"{each} times {workers.cpus} CPUs, but a node of partition {partition!r} has {node.cpus}"
        yield f"{_KEY}.cpus", what
    if workers.memory_gib is not None and workers.memory_gib * each > node.memory_gib:
        what = f"{each} times {workers.memory_gib:g} GiB, but a node of partition {partition!r} has {node.memory_gib:g}"
        yield f"{_KEY}.memory_gib", what
    if workers.cpus is None and each > node.cpus:
        yield f"{_KEY}.per_node", f"{each} workers, but a node of partition {partition!r} has {node.cpus} CPUs"


WORKER_RULES: tuple[Rule, ...] = (
    Rule(
        "workers-have-environments",
        "Workers of environments belong to a run with rollouts.",
        "remove environment_workers",
        _has_rollouts,
    ),
    Rule(
        "workers-not-elastic",
        "In the layout elastic, workers of environments run on the trainer's first node, as many as the recipe says.",
        "set environment_workers.placement: trainer_node, or choose another job.layout",
        _not_elastic,
    ),
    Rule(
        "workers-shape",
        "The parts of nodes that workers get are whole, and workers have nodes of their own.",
        "give both cpus and memory_gib for parts of nodes, or neither, and per_node up to count",
        _shape,
    ),
    Rule(
        "workers-fit-node",
        "The workers on one node fit into it.",
        "lower environment_workers.per_node, cpus or memory_gib",
        _fits_node,
    ),
)
