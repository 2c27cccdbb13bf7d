"""Rules between what a recipe asks for and the nodes, partitions and Slurm of a site."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, LocalCluster, SlurmCluster
from hpcrl.config.recipe import EngineConfig, Recipe
from hpcrl.config.rule import Conflicts, Rule

__all__ = ["JOB_RULES"]


def _engine_groups(recipe: Recipe) -> list[tuple[str, str, int, int]]:
    """Key, role, replicas and nodes of one replica."""
    engine = recipe.engine
    sides = [("prefill", engine.prefill), ("decode", engine.decode)]
    groups = [(f"engine.{name}", name, side.replicas, side.nodes) for name, side in sides if side is not None]
    return groups or [("engine", "engine", engine.replicas, engine.nodes)]


def _payload_exists(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.job.payload == "probe":
        return
    if recipe.engine.backend == "vllm":
        yield "engine.backend", "this version cannot start vLLM engines yet, nor the router and the KV store they need"
    if recipe.engine.prefill is not None or recipe.engine.decode is not None:
        yield "engine.prefill", "this version has no router that could lead requests from prefill to decode"


def _sides_together(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if (engine.prefill is None) != (engine.decode is None):
        missing = "decode" if engine.decode is None else "prefill"
        yield "engine", f"disaggregated serving has two sides; {missing} is missing"
    if engine.prefill is not None:
        for name in ("replicas", "nodes"):
            if getattr(engine, name) != EngineConfig.model_fields[name].default:
                yield f"engine.{name}", "has no effect beside prefill and decode, which have their own"


def _embedded_on_one_node(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.backend != "embedded":
        return
    for key, _role, _replicas, nodes in _engine_groups(recipe):
        if nodes > 1:
            yield f"{key}.nodes", f"an embedded engine is one process and cannot use {nodes} nodes"


def _ranks_per_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer = recipe.trainer
    if trainer.ranks % trainer.nodes:
        yield "trainer.ranks", f"{trainer.ranks} ranks are not the same number on each of {trainer.nodes} nodes"
    elif isinstance(cluster, SlurmCluster):
        node = cluster.partitions[cluster.partition_name("trainer")].node
        if node.gpus and trainer.ranks // trainer.nodes > node.gpus:
            yield "trainer.ranks", f"{trainer.ranks // trainer.nodes} ranks a node, but a node has {node.gpus} GPUs"


def _local_is_one_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, LocalCluster):
        return
    groups = [("trainer", "trainer", 1, recipe.trainer.nodes), *_engine_groups(recipe)]
    for key, _role, _replicas, nodes in groups:
        if nodes > 1:
            yield f"{key}.nodes", f"{nodes} nodes, but a local cluster is one machine"


def _nodes_available(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, SlurmCluster):
        return
    wanted: dict[str, list[tuple[str, int]]] = {}
    for key, role, replicas, nodes in [("trainer", "trainer", 1, recipe.trainer.nodes), *_engine_groups(recipe)]:
        wanted.setdefault(cluster.partition_name(role), []).append((key, replicas * nodes))
    for partition, roles in wanted.items():
        total, available = sum(nodes for _, nodes in roles), cluster.partitions[partition].nodes
        if total > available:
            parts = " + ".join(f"{key} {nodes}" for key, nodes in roles)
            yield f"{roles[0][0]}.nodes", f"{total} nodes of partition {partition!r} ({parts}), which has {available}"


def _layout_possible(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, SlurmCluster):
        return
    roles = ["trainer", *(role for _, role, _, _ in _engine_groups(recipe))]
    names = {role: cluster.partition_name(role) for role in roles}
    differ = len(set(names.values())) > 1
    if recipe.job.layout == "single" and differ:
        shown = ", ".join(f"{role} in {name}" for role, name in names.items())
        yield "job.layout", f"one allocation has one partition, but the site places {shown}"
    needs_hetjob = recipe.job.layout == "hetjob" or (recipe.job.layout == "auto" and differ)
    if needs_hetjob and not cluster.capabilities.hetjob:
        yield "job.layout", f"{cluster.name} has no heterogeneous jobs (capabilities.hetjob)"


def _requeue_possible(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, SlurmCluster) or recipe.job.requeue != "always":
        return
    for capability in ("requeue", "scontrol_on_nodes"):
        if not getattr(cluster.capabilities, capability):
            yield "job.requeue", f"{cluster.name} cannot (capabilities.{capability})"


def _time_fits(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, SlurmCluster):
        return
    own = recipe.job.time_limit_h
    hours, key = (cluster.limits.time_limit_h, "cluster.limits") if own is None else (own, "job")
    for role in ("trainer", *(role for _, role, _, _ in _engine_groups(recipe))):
        partition = cluster.partition_name(role)
        most = cluster.partitions[partition].max_time_h
        if most is not None and hours > most:
            yield f"{key}.time_limit_h", f"{hours:g} h, but partition {partition!r} ({role}) ends jobs after {most:g} h"
            return
    if hours * 3600 <= cluster.limits.save_timeout_s:
        yield f"{key}.time_limit_h", f"{hours:g} h leave no time beside a save of {cluster.limits.save_timeout_s:g} s"


def _attempts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    job = recipe.job
    if job.max_attempts_without_progress > job.max_attempts:
        yield (
            "job.max_attempts_without_progress",
            f"{job.max_attempts_without_progress} is more than max_attempts {job.max_attempts}",
        )


JOB_RULES: tuple[Rule, ...] = (
    Rule(
        "payload-exists",
        "Everything that a run starts is part of this version.",
        "choose engine.backend: embedded without prefill and decode, or try the shape of the job: "
        "--set job.payload=probe",
        _payload_exists,
    ),
    Rule(
        "two-sides",
        "Disaggregated serving has both sides, each with its own size.",
        "give both engine.prefill and engine.decode, or neither",
        _sides_together,
    ),
    Rule("embedded-on-one-node", "An embedded engine is on one node.", "set nodes to 1", _embedded_on_one_node),
    Rule(
        "ranks-per-node",
        "Trainer ranks are spread evenly, one GPU each.",
        "choose trainer.ranks as trainer.nodes times the ranks of a node",
        _ranks_per_node,
    ),
    Rule(
        "local-is-one-node",
        "A local run is on one machine.",
        "choose a Slurm site with --cluster, or set nodes to 1",
        _local_is_one_node,
    ),
    Rule(
        "nodes-available",
        "The partitions have the nodes that the roles need.",
        "lower nodes or replicas, or place roles in other partitions",
        _nodes_available,
    ),
    Rule(
        "layout-possible",
        "The site can run the layout.",
        "choose another job.layout, or correct the profile (`hpcrl cluster check`)",
        _layout_possible,
    ),
    Rule(
        "requeue-possible",
        "A run that must be requeued can be.",
        "set job.requeue: auto, and resume by hand, or ask the admins for JobRequeue and scontrol on compute nodes",
        _requeue_possible,
    ),
    Rule(
        "time-limit-fits",
        "The time limit is one that the partitions take, and longer than a save.",
        "set job.time_limit_h between the time of a save and the limit of the partition",
        _time_fits,
    ),
    Rule(
        "attempts-order",
        "Giving up without progress comes before the last attempt.",
        "raise job.max_attempts or lower max_attempts_without_progress",
        _attempts,
    ),
)
