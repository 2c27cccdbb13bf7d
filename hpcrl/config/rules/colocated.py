"""Rules about engines that take turns with the trainer on its devices: what they cannot have."""

from __future__ import annotations

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.recipe import HandoffConfig, Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, on_slurm


def _disaggregated(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if not engine.is_colocated:
        return
    if engine.prefill is not None or engine.decode is not None:
        key = "engine.prefill" if engine.prefill is not None else "engine.decode"
        yield key, "prefill and decode have nodes of their own"
    if engine.kv_store is not None:
        yield "engine.kv_store", "a KV pool has no use: every turn changes the weights and discards the KV"
    if recipe.job.layout == "elastic":
        yield "job.layout", "elastic replicas have their own jobs"
    if engine.nodes > 1:
        yield "engine.nodes", "a replica of several nodes cannot be on the trainer's node"
    if recipe.trainer.nodes > 1:
        yield "trainer.nodes", f"layers are handed over in memory of one node; the trainer has {recipe.trainer.nodes}"
    if engine.router.kind not in ("auto", "direct"):
        yield "engine.router.kind", "a router chooses among engines that serve all the time"


def _one_backend(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.is_colocated and recipe.engine.backend != "embedded":
        yield "engine.backend", f"engines of the backend {recipe.engine.backend!r} do not take turns in this version"


@on_slurm
def _one_device(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    """Require that the trainer's nodes have no GPUs for colocated engines; a local run's devices are not known."""
    if not recipe.engine.is_colocated or recipe.engine.device == "cpu":
        return
    partition = cluster.partition_name("trainer")
    if gpus := cluster.partitions[partition].node.gpus:
        yield (
            "engine.placement",
            f"colocated engines compute on processors, and the trainer's nodes ({partition}) have {gpus} GPUs, which "
            "would be idle",
        )


def _turns(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if not recipe.engine.is_colocated:
        return
    rollouts = recipe.rollouts
    if rollouts.max_off_policy_steps > 1:
        yield (
            "rollouts.max_off_policy_steps",
            f"{rollouts.max_off_policy_steps} would let batches pile up: a turn ends with its first complete batch",
        )
    if rollouts.order != "arrival":
        yield "rollouts.order", "weights are always those of the trainer's last turn; no other step can be chosen"
    if recipe.engine.pause != "keep":
        yield "engine.pause", "the engine has no weights while they change"


def _no_files(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if not recipe.engine.is_colocated:
        return
    handoff = recipe.handoff
    for name in ("kind", "dtype", "delta_chain", "fanout", "sync", "transport"):
        # a resolved recipe names every setting: only one that differs from its default was meant
        if getattr(handoff, name) != HandoffConfig.model_fields[name].default:
            yield f"handoff.{name}", "weights are handed over in memory, in engine.dtype and whole"


def _whole_trainer(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if not recipe.engine.is_colocated:
        return
    memory = recipe.trainer.memory
    if memory.parameter_offload:
        yield "trainer.memory.parameter_offload", "parameters in host memory cannot take turns on the device"
    if recipe.trainer.lora is not None:
        yield "trainer.lora", "adapters are handed over by files in this version"
    if (kl := recipe.algorithm.kl) is not None and not kl.on_host:
        yield "algorithm.kl", "the copy of the start model would stay on the device: set algorithm.kl.on_host"


COLOCATED_RULES: tuple[Rule, ...] = (
    Rule(
        "colocated-one-place",
        "Engines that share the trainer's devices have no placement of their own.",
        "set engine.placement: apart, or leave this out",
        _disaggregated,
    ),
    Rule(
        "colocated-backend",
        "Engines that take turns with the trainer are embedded ones.",
        "set engine.backend: embedded, or engine.placement: apart",
        _one_backend,
    ),
    Rule(
        "colocated-device",
        "Engines that take turns with the trainer compute on processors, and so does the trainer.",
        "set engine.placement: apart and engine.backend: vllm; or engine.device: cpu, to let the GPUs wait",
        _one_device,
    ),
    Rule(
        "colocated-turns",
        "Trainer and engines take turns: rollouts are of the trainer's version, or of the one before.",
        "set max_off_policy_steps: 0 (synchronous) or 1 (one step behind), order: arrival and engine.pause: keep; or "
        "engine.placement: apart",
        _turns,
    ),
    Rule(
        "colocated-memory",
        "Weights for engines on the same devices go through memory.",
        "remove the setting, or set engine.placement: apart",
        _no_files,
    ),
    Rule(
        "colocated-trainer",
        "The trainer's tensors can leave its devices while engines generate.",
        "remove the setting, or set engine.placement: apart",
        _whole_trainer,
    ),
)
