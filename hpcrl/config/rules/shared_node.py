"""Rules about engines on the trainer's node, with GPUs of their own or on the trainer's GPUs."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_ranks_per_node
from hpcrl.config.plan import Role
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule


def _one_node(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if not engine.shares_node:
        return
    for key, nodes in (("trainer.nodes", recipe.trainer.nodes), ("engine.nodes", engine.nodes)):
        if nodes > 1:
            yield key, f"{nodes} nodes, and trainer and engines share one"
    for key, side in (("engine.prefill", engine.prefill), ("engine.decode", engine.decode)):
        if side is not None:
            yield key, "prefill and decode have nodes of their own"
    if recipe.job.layout == "elastic":
        yield "job.layout", "elastic replicas have their own jobs"
    if isinstance(cluster, SlurmCluster):
        trainer, engines = cluster.partition_name("trainer"), cluster.partition_name("engine")
        if trainer != engines:
            yield "job.partition", f"the trainer is in {trainer!r}, engines are in {engines!r}: that is not one node"


def _parts_fit(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    engine, trainer = recipe.engine, recipe.trainer
    if not engine.shares_node or not isinstance(cluster, SlurmCluster):
        return
    node = cluster.node_of("trainer")
    if engine.shares_gpus and node.gpus:
        return
    if node.gpus and engine.backend == "vllm" and engine.device == "auto":
        left = node.gpus - trainer.ranks
        if left < 1:
            yield "trainer.ranks", f"{trainer.ranks} ranks leave engines none of the {node.gpus} GPUs of a node"
        elif left % engine.replicas:
            yield "engine.replicas", f"{engine.replicas} replicas cannot share {left} GPUs evenly"
    ranks = trainer.ranks + engine.replicas * engine_ranks_per_node(recipe, cluster, Role.ENGINE)
    if ranks > node.cpus:
        yield "trainer.ranks", f"{ranks} ranks of trainer and engines on a node of {node.cpus} CPUs"


def _same_gpus(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    engine, ranks = recipe.engine, recipe.trainer.ranks
    if not engine.shares_gpus or not isinstance(cluster, SlurmCluster):
        return
    gpus = cluster.node_of("trainer").gpus
    if not gpus:
        return
    if engine.backend != "vllm":
        yield "engine.backend", f"engines of the backend {engine.backend!r} compute on processors, and use no GPU"
    if engine.device == "cpu":
        yield "engine.device", "engines on processors use no GPU"
    if ranks > gpus:
        yield "trainer.ranks", f"{ranks} ranks on a node of {gpus} GPUs"
    elif ranks % engine.replicas:
        yield "engine.replicas", f"{engine.replicas} replicas cannot share the {ranks} GPUs of the trainer evenly"


SHARED_NODE_RULES: tuple[Rule, ...] = (
    Rule(
        "shared-node",
        "Trainer and engines that share a node use one node.",
        "set engine.placement: apart, or one node for the trainer and for a replica, without prefill and decode, in "
        "one partition",
        _one_node,
    ),
    Rule(
        "shared-node-parts",
        "The parts of a shared node are whole GPUs, and there is a CPU for each rank.",
        "choose trainer.ranks below the GPUs of a node, and engine.replicas as a divisor of what is left",
        _parts_fit,
    ),
    Rule(
        "shared-gpus",
        "Engines on the trainer's GPUs are vLLM engines, each on as many of them.",
        "set engine.placement: shared_node for engines on processors; otherwise engine.backend: vllm, engine.device: "
        "auto, and engine.replicas as a divisor of trainer.ranks",
        _same_gpus,
    ),
)
