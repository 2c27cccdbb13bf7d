"""Rules about parallelism and memory-saving settings of trainer and engines that need no facts about the model.

Those that need them are in `hpcrl.jobplan.model_rules`.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.config.base import StrictModel
from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.engine_shape import engine_gpus, replica_nodes, vllm_flag
from hpcrl.config.recipe import Recipe
from hpcrl.config.rules.rule import Conflicts, Rule, on_slurm, trainer_needs_gpus
from hpcrl.errors import ConfigError, Finding

_LORA_MAX_RANK = 512
"""Largest rank of an adapter that is published; vLLM itself loads none of a higher one."""


def _changed(model: StrictModel) -> Iterator[str]:
    """Yield the fields that differ from their defaults."""
    for name, field in type(model).model_fields.items():
        if getattr(model, name) != field.default:
            yield name


def _planned_settings(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.job.payload != "probe":
        yield from _planned_only(recipe)


def _planned_only(recipe: Recipe) -> Conflicts:
    if recipe.engine.tp != 1:
        yield "engine.tp", "the planner reads it, but the engines of this version are one process each"


def refuse_planned_settings(recipe: Recipe, where: str) -> None:
    """Refuse what a submit refuses, in a role that was started without one: it would run as if the setting were absent.

    Raises
    ------
    ConfigError
        With every setting that is planned, but no part of this version.
    """
    (rule,) = (rule for rule in PARALLEL_RULES if rule.check is _planned_settings)
    hint = "remove the setting"
    findings = [Finding(where, key, f"{what} [{rule.name}]", hint) for key, what in _planned_only(recipe)]
    if findings:
        raise ConfigError(findings)


def _world_size(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    trainer, copies = recipe.trainer, recipe.trainer.parallelism.dp_replicate
    for name in ("dp_replicate", "ep", "cp"):
        degree = getattr(trainer.parallelism, name)
        if trainer.ranks % degree:
            yield f"trainer.parallelism.{name}", f"{degree} does not divide the {trainer.ranks} ranks of the trainer"
        elif name != "dp_replicate" and trainer.ranks % copies == 0 and trainer.ranks // copies % degree:
            left = f"the {trainer.ranks // copies} ranks of a copy (trainer.parallelism.dp_replicate {copies})"
            yield f"trainer.parallelism.{name}", f"{degree} does not divide {left}"


def _dispatcher_fits(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    trainer, key = recipe.trainer, "trainer.parallelism.dispatcher"
    if trainer.parallelism.dispatcher != "deepep":
        return
    if trainer.parallelism.ep == 1:
        yield key, "deepep takes tokens to other ranks, and with trainer.parallelism.ep 1 all experts are on each"
    if trainer.dtype != "bfloat16":
        yield key, f"deepep carries bfloat16 alone, and trainer.dtype is {trainer.dtype}"
    yield from trainer_needs_gpus(cluster, key, "deepep")


def _replica_size(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    tp = recipe.engine.tp
    for role, nodes in replica_nodes(recipe).items():
        if (gpus := nodes * engine_gpus(recipe, cluster, role)) % tp:
            yield "engine.tp", f"{tp} does not divide the {gpus} GPUs of a replica of {role}"


def _replay_sees_all_routes(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if not recipe.returns_routed_experts:
        return
    lost = {
        "async-scheduling": "preempted requests lose their routed experts if steps are scheduled ahead",
        "enable-eplb": "load balancing moves experts, and the engine then reports slots, not experts",
    }
    for flag, what in lost.items():
        yield from ((key, what) for key, value in vllm_flag(recipe, flag) if value)


def _planned_memory(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    memory = recipe.engine.memory
    share, dtype = memory.gpu_memory_utilization, memory.kv_cache_dtype
    for key, value in vllm_flag(recipe, "gpu-memory-utilization"):
        if value != share:
            yield key, f"{value} is not engine.memory.gpu_memory_utilization ({share:g}), which plans count with"
    for key, value in vllm_flag(recipe, "kv-cache-dtype"):
        # vLLM has several kinds of FP8, of the same size
        if value != dtype and not (dtype == "fp8" and str(value).startswith("fp8")):
            yield key, f"{value} is not engine.memory.kv_cache_dtype ({dtype}), which plans count with"


def _adapters_load(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    lora = recipe.trainer.lora
    if lora is None:
        return
    if lora.rank > _LORA_MAX_RANK:
        yield "trainer.lora.rank", f"{lora.rank} is more than the {_LORA_MAX_RANK} that an adapter may have"
    merged = "an adapter that is merged into FP8 weights loses most of its bits in their rounding"
    if recipe.engine.memory.weights == "fp8":
        yield "engine.memory.weights", merged
    if recipe.handoff.kind == "fp8":
        yield "handoff.kind", merged
    if recipe.trainer.precision.fp8 is not None:
        yield "trainer.precision.fp8", f"engines would need the same FP8 weights, and {merged}"


def _adapters_train(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    lora, trainer = recipe.trainer.lora, recipe.trainer
    if lora is None:
        return
    if trainer.freeze is not None:
        yield "trainer.freeze", "only adapters are trained, and no weight of the model is"
    if recipe.handoff.delta_chain:
        yield "handoff.delta_chain", "versions are adapters, which are published whole"
    if trainer.dtype == "bfloat16" and lora.rank % 8:
        yield "trainer.lora.rank", f"{lora.rank} is not a multiple of 8, which grouped products in bfloat16 require"
    if trainer.memory.compile:
        yield "trainer.memory.compile", "layers with adapters are not compiled"
    if trainer.optimizer.kind == "muon":
        what = "muon orthogonalises whole matrices; of an adapter only the product of its two factors is one"
        yield "trainer.optimizer.kind", what


def _offload_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    memory = recipe.trainer.memory
    if memory.activation_offload and memory.activation_checkpointing == "none":
        yield "trainer.memory.activation_offload", "offloads inputs of layers, which checkpointing alone keeps"


def _offloaded_once(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    memory = recipe.trainer.memory
    if memory.optimizer_offload and memory.parameter_offload:
        yield "trainer.memory.optimizer_offload", "parameter_offload has the optimizer in host memory already"


def _checkpointing_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    memory = recipe.trainer.memory
    if memory.checkpoint_every_layers > 1 and memory.activation_checkpointing == "none":
        yield "trainer.memory.checkpoint_every_layers", "selects layers for checkpointing, which is off"


def _compile_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    memory = recipe.trainer.memory
    if memory.compile and memory.activation_checkpointing == "selective":
        what = "watches every operator of a layer to keep some outputs, and a compiled layer has other operators"
        yield "trainer.memory.activation_checkpointing", f"selective {what}"
    if memory.compile and recipe.trainer.precision.fp8 is not None:
        yield "trainer.precision.fp8", "products in FP8 are not compiled, and layers around them were never tried"


def _chunk_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    chunk = recipe.trainer.memory.lm_head_chunk_tokens
    tokens = -(-recipe.trainer.micro_batch_tokens // recipe.trainer.parallelism.cp)
    if isinstance(chunk, int) and chunk >= tokens:
        yield "trainer.memory.lm_head_chunk_tokens", f"{chunk} is not less than the {tokens} tokens of a micro-batch"


def _engine_memory_applies(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    engine = recipe.engine
    if engine.backend != "embedded":
        return
    for name in _changed(engine.memory):
        yield f"engine.memory.{name}", "has no effect on the embedded engine, which reads engine.kv_cache_gib"


def _store_shares(recipe: Recipe, _: ClusterProfile) -> Conflicts:
    if recipe.engine.memory.kv_offload_gib and recipe.engine.kv_store is not None:
        yield "engine.memory.kv_offload_gib", "vLLM offloads blocks to one place only, and engine.kv_store is one"


def _offload_leaves_a_gpu(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    if not recipe.engine.memory.kv_offload_gib:
        return
    roles = ("prefill", "decode") if recipe.engine.prefill is not None else ("engine",)
    if recipe.engine.device == "cpu" or not isinstance(cluster, SlurmCluster):
        without = list(roles)
    else:
        nodes = {role: cluster.node_of(role) for role in roles}
        without = [role for role, node in nodes.items() if not node.gpus]
    if without:
        what = f"engines without GPUs ({', '.join(without)}) have all of their KV in host memory"
        yield "engine.memory.kv_offload_gib", what


def _disk_is_below_host(recipe: Recipe, cluster: ClusterProfile) -> Conflicts:
    memory = recipe.engine.memory
    if not memory.kv_offload_disk_gib:
        return
    if not memory.kv_offload_gib:
        yield "engine.memory.kv_offload_gib", "blocks go to the disk through host memory, and this setting is 0"
    if cluster.scratch is None:
        yield "engine.memory.kv_offload_disk_gib", "the site names no scratch directory on the disks of its nodes"


@on_slurm
def _host_holds_offload(recipe: Recipe, cluster: SlurmCluster) -> Conflicts:
    offload = recipe.engine.memory.kv_offload_gib
    for role in ("prefill", "decode") if recipe.engine.prefill is not None else ("engine",):
        host = cluster.node_of(role).memory_gib
        if offload > host:
            yield "engine.memory.kv_offload_gib", f"{offload:g} GiB on nodes of {host:g} GiB ({role})"


PARALLEL_RULES: tuple[Rule, ...] = (
    Rule(
        "planned-settings",
        "This version supports the settings of the run.",
        "remove the setting, or try the shape of the job: --set job.payload=probe",
        _planned_settings,
        submit_only=True,
    ),
    Rule(
        "world-size",
        "The degrees of parallelism divide the trainer's ranks.",
        "choose dp_replicate as a divisor of trainer.ranks, and ep and cp as divisors of trainer.ranks / dp_replicate",
        _world_size,
    ),
    Rule(
        "dispatcher-fits",
        "DeepEP needs expert parallelism on GPUs, in bfloat16.",
        "set trainer.parallelism.dispatcher: all_to_all, or ep above 1 and trainer.dtype: bfloat16 on nodes with GPUs",
        _dispatcher_fits,
    ),
    Rule(
        "replica-size",
        "Tensor parallelism divides the GPUs of a replica.",
        "choose engine.tp as a divisor of nodes times GPUs of a node",
        _replica_size,
    ),
    Rule(
        "adapters-load",
        "Engines can load the adapters that are trained.",
        "set engine.memory.weights: as_dtype, handoff.kind: full, no trainer.precision.fp8 and a rank of at most 512, "
        "or train all parameters",
        _adapters_load,
    ),
    Rule(
        "adapters-train",
        "Settings together with adapters have an effect.",
        "remove the setting, or train all parameters: leave trainer.lora out",
        _adapters_train,
    ),
    Rule(
        "replay-sees-all-routes",
        "Engines that return routed experts return those of every token.",
        "set async-scheduling: false and enable-eplb: false in vllm_args, or trainer.router_replay and "
        "engine.return_routed_experts: false",
        _replay_sees_all_routes,
    ),
    Rule(
        "planned-engine-memory",
        "Engines use the memory of a GPU that plans count.",
        "leave the flag out: hpcrl gives vLLM the value of engine.memory",
        _planned_memory,
    ),
    Rule(
        "checkpointing-applies",
        "A checkpointing interval in layers selects at least one layer.",
        "set trainer.memory.activation_checkpointing, or leave out checkpoint_every_layers",
        _checkpointing_applies,
    ),
    Rule(
        "activation-offload-applies",
        "Offloaded activations need activation checkpointing.",
        "set trainer.memory.activation_checkpointing: full, or activation_offload: false",
        _offload_applies,
    ),
    Rule(
        "optimizer-offloaded-once",
        "One setting moves the optimizer to host memory.",
        "leave out trainer.memory.optimizer_offload, or parameter_offload, which takes more time",
        _offloaded_once,
    ),
    Rule(
        "compile-applies",
        "Compiled layers are recomputed as a whole, or not at all.",
        "set trainer.memory.activation_checkpointing: full or none, or trainer.memory.compile: false",
        _compile_applies,
    ),
    Rule(
        "head-chunk-applies",
        "A chunk of the head is smaller than a micro-batch.",
        "lower trainer.memory.lm_head_chunk_tokens or remove it",
        _chunk_applies,
    ),
    Rule(
        "engine-memory-applies",
        "Memory settings of vLLM are for vLLM.",
        "set engine.kv_cache_gib instead, or engine.backend: vllm",
        _engine_memory_applies,
    ),
    Rule(
        "one-kv-tier",
        "KV blocks are offloaded from the GPU to one place.",
        "set kv_offload_gib: 0, or remove kv_store",
        _store_shares,
    ),
    Rule(
        "offload-leaves-gpu",
        "KV blocks are moved to host memory from a GPU.",
        "set kv_offload_gib: 0, and lower engine.kv_cache_gib to fit the host",
        _offload_leaves_a_gpu,
    ),
    Rule(
        "disk-below-host",
        "Offloading KV blocks to disk needs host memory and a scratch directory.",
        "set kv_offload_gib and paths.scratch of the site, or kv_offload_disk_gib: 0",
        _disk_is_below_host,
    ),
    Rule(
        "host-holds-offload",
        "The host memory of a node holds the KV blocks that leave its GPUs.",
        "lower kv_offload_gib",
        _host_holds_offload,
    ),
)
