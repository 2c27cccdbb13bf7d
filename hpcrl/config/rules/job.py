"""Rules between what a recipe asks for and the nodes, partitions and Slurm of a site."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, LocalCluster, SlurmCluster
from hpcrl.config.cluster_slurm import SIGNAL_EARLY_S
from hpcrl.config.node_demands import demands, engine_groups
from hpcrl.config.recipe import EngineConfig, Recipe
from hpcrl.config.rules.engine import PAYLOAD_RULE
from hpcrl.config.rules.rule import Conflicts, Rule, on_slurm
from hpcrl.config.rules.sandbox_rules import SANDBOX_RULES
from hpcrl.config.rules.spare_rules import SPARE_RULES
from hpcrl.config.rules.worker_rules import WORKER_RULES
from hpcrl.config.sbatch_options import option_faults

ENOUGH_NODES = "nodes-available"
ONE_NODE = "local-is-one-node"
"""Name of the rule whose conflict means that a valid recipe does not fit the site: plans have an exit code for it."""


def _prefill_and_decode(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if (engine.prefill is None) != (engine.decode is None):
        missing = "decode" if engine.decode is None else "prefill"
        yield "engine", f"disaggregated serving needs prefill and decode; {missing} is missing"
    if engine.prefill is not None:
        for name in ("replicas", "nodes"):
            if getattr(engine, name) != EngineConfig.model_fields[name].default:
                yield f"engine.{name}", "has no effect together with prefill and decode, which have their own"


def _only_engines_restart(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for name in ("trainer", "orchestrator"):
        policy = getattr(recipe.supervision, name)
        if policy.restart != "never":
            yield f"supervision.{name}.restart", f"the {name} cannot be restarted while other roles are at another step"
        if not policy.critical:
            yield f"supervision.{name}.critical", f"the run cannot continue without the {name}"


def _hang_limits(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    supervision = recipe.supervision
    if supervision.hang_floor_s > supervision.hang_ceiling_s:
        what = f"{supervision.hang_floor_s:g} is more than hang_ceiling_s ({supervision.hang_ceiling_s:g})"
        yield "supervision.hang_floor_s", what


def _embedded_on_one_node(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.backend != "embedded":
        return
    for key, _role, _replicas, nodes in engine_groups(recipe):
        if nodes > 1:
            yield f"{key}.nodes", f"an embedded engine is one process and cannot use {nodes} nodes"


def _ranks_per_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer = recipe.trainer
    if trainer.ranks % trainer.nodes:
        yield "trainer.ranks", f"{trainer.ranks} ranks are not the same number on each of {trainer.nodes} nodes"
    elif isinstance(cluster, SlurmCluster):
        node = cluster.node_of("trainer")
        if node.gpus and trainer.ranks // trainer.nodes > node.gpus:
            yield "trainer.ranks", f"{trainer.ranks // trainer.nodes} ranks a node, but a node has {node.gpus} GPUs"


def _local_is_one_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not isinstance(cluster, LocalCluster):
        return
    groups = [("trainer", "trainer", 1, recipe.trainer.nodes), *engine_groups(recipe)]
    for key, _role, _replicas, nodes in groups:
        if nodes > 1:
            yield f"{key}.nodes", f"{nodes} nodes, but a local cluster is one machine"


@on_slurm
def _nodes_available(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    wanted: dict[str, list[tuple[str, int]]] = {}
    for demand in demands(recipe, cluster):
        counts, role = wanted.setdefault(demand.partition, []), demand.role.value
        counts.append((demand.key, demand.replicas * demand.nodes))
        # engines of the layout elastic are jobs of their own, without spare nodes
        if (spares := recipe.job.spares_of(role)) and (recipe.job.layout != "elastic" or role == "trainer"):
            counts.append((f"job.spare_nodes.{role}", spares))
    for partition, roles in wanted.items():
        total, available = sum(nodes for _, nodes in roles), cluster.partitions[partition].nodes
        if total > available:
            parts = " + ".join(f"{key} {nodes}" for key, nodes in roles)
            yield f"{roles[0][0]}.nodes", f"{total} nodes of partition {partition!r} ({parts}), which has {available}"


@on_slurm
def _layout_possible(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    names = {demand.role.value: demand.partition for demand in demands(recipe, cluster)}
    differ = len(set(names.values())) > 1
    if recipe.job.layout == "single" and differ:
        shown = ", ".join(f"{role} in {name}" for role, name in names.items())
        yield "job.layout", f"one allocation has one partition, but the site places {shown}"
    if recipe.job.layout == "elastic" and cluster.orchestrator_apart:
        beside = f"job.partition={{orchestrator: {cluster.partition_name('trainer')}}}"
        yield (
            "job.layout",
            f"the orchestrator has no job of its own if engines are elastic; {beside} keeps it on a trainer node",
        )
    needs_hetjob = recipe.job.layout == "hetjob" or (recipe.job.layout == "auto" and differ)
    if needs_hetjob and not cluster.capabilities.hetjob:
        yield "job.layout", f"{cluster.name} has no heterogeneous jobs (capabilities.hetjob)"


@on_slurm
def _requeue_possible(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    if recipe.job.requeue != "always":
        return
    for capability in ("requeue", "scontrol_on_nodes"):
        if not getattr(cluster.capabilities, capability):
            yield "job.requeue", f"{cluster.name} cannot (capabilities.{capability})"


@on_slurm
def _time_fits(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    own = recipe.job.time_limit_h
    hours, key = (cluster.limits.time_limit_h, "cluster.limits") if own is None else (own, "job")
    for demand in demands(recipe, cluster):
        most = cluster.partitions[demand.partition].max_time_h
        if most is not None and hours > most:
            where = f"partition {demand.partition!r} ({demand.role.value})"
            yield f"{key}.time_limit_h", f"{hours:g} h, but {where} ends jobs after {most:g} h"
            return
    warned_s = cluster.limits.signal_lead_s + SIGNAL_EARLY_S
    if hours * 3600 <= warned_s:
        early = f"the warning to save comes up to {warned_s:g} s before the end"
        what = f"{hours * 60:.3g} min leave no time to train: {early}"
        yield f"{key}.time_limit_h", what


def _attempts(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    job = recipe.job
    if job.max_attempts_without_progress > job.max_attempts:
        yield (
            "job.max_attempts_without_progress",
            f"{job.max_attempts_without_progress} is more than max_attempts {job.max_attempts}",
        )


def _enough_replicas(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    least = recipe.job.min_replicas
    if recipe.job.layout != "elastic":
        if least != 1:
            yield "job.min_replicas", f"has no effect in the layout {recipe.job.layout}: all replicas start together"
        return
    for key, _role, replicas, _nodes in engine_groups(recipe):
        if replicas < least:
            yield "job.min_replicas", f"{least} is more than {key}.replicas, which is {replicas}"
    if recipe.job.payload == "evaluation":
        yield "job.layout", "an evaluation has a fixed number of engines"
    if recipe.job.payload == "probe":
        yield (
            "job.layout",
            "the payload probe counts ranks that start together; elastic replicas do not",
        )


def _sbatch_options(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    for index, fault in option_faults(recipe.job.sbatch_options):
        yield f"job.sbatch_options.{index}", fault


JOB_RULES: tuple[Rule, ...] = (
    PAYLOAD_RULE,
    Rule(
        "prefill-and-decode",
        "Disaggregated serving has engines for prefill and for decode, each with their own size.",
        "give both engine.prefill and engine.decode, or neither",
        _prefill_and_decode,
    ),
    Rule(
        "only-engines-restart",
        "Only engines are restarted in place, and only an engine can be spared.",
        "leave restart and critical as they are; job.retry_failures says how often a new attempt follows",
        _only_engines_restart,
    ),
    Rule("hang-limits", "The floor of the hang limit is below its ceiling.", "lower the floor", _hang_limits),
    Rule("embedded-on-one-node", "An embedded engine is on one node.", "set nodes to 1", _embedded_on_one_node),
    Rule(
        "ranks-per-node",
        "Trainer ranks are spread evenly, one GPU each.",
        "choose trainer.ranks as trainer.nodes times the ranks of a node",
        _ranks_per_node,
    ),
    Rule(
        ONE_NODE,
        "A local run is on one machine.",
        "choose a Slurm site with --cluster, or set nodes to 1",
        _local_is_one_node,
    ),
    Rule(
        ENOUGH_NODES,
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
        "A site can requeue a run with job.requeue.",
        "set job.requeue: auto, and resume by hand, or ask the admins for JobRequeue and scontrol on compute nodes",
        _requeue_possible,
    ),
    Rule(
        "time-limit-fits",
        "The time limit is one that the partitions take, and longer than a save.",
        "set job.time_limit_h between the warning before a save and the limit of the partition",
        _time_fits,
    ),
    Rule(
        "attempts-order",
        "Giving up without progress comes before the last attempt.",
        "raise job.max_attempts or lower max_attempts_without_progress",
        _attempts,
    ),
    Rule(
        "enough-replicas",
        "An elastic run waits for no more replicas than it has.",
        "lower job.min_replicas, or choose the layout that fits",
        _enough_replicas,
    ),
    Rule(
        "sbatch-options",
        "job.sbatch_options are options of sbatch that hpcrl does not set itself.",
        "leave it out; `hpcrl render` writes the script with all options",
        _sbatch_options,
    ),
    *SPARE_RULES,
    *WORKER_RULES,
    *SANDBOX_RULES,
)
