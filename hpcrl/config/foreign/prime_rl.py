"""Files of prime-rl (TOML): one file for trainer, orchestrator and inference, as ``uv run rl @ FILE`` takes it.

Keys are those of prime-rl 0.8 and, where they were renamed, of the versions before. Source: its ``configs/`` and
``src/prime_rl/configs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcrl.config.foreign.foreign_settings import Outcome, Settings, whole

_OFF_POLICY = (
    "hpcrl counts from the version of the first sampled token to the version that trains; prime-rl from the step in "
    "which the rollout began"
)
_ENGINE = {
    "max_model_len": "engine.max_model_len",
    "tensor_parallel_size": "engine.tp",
    "tp": "engine.tp",
    "gpu_memory_utilization": "engine.memory.gpu_memory_utilization",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "dtype": "engine.dtype",
}


def translate_prime_rl(settings: Settings) -> None:
    """Fill the recipe from the settings of prime-rl."""
    settings.put("engine.backend", "vllm")
    settings.put("trainer.dtype", "bfloat16")
    settings.put("engine.dtype", "bfloat16")
    _model(settings)
    _loop(settings)
    _trainer(settings)
    _engines(settings)
    _environments(settings)
    _rest(settings)


def _model(settings: Settings) -> None:
    for key in (
        "model.name",
        "trainer.model.name",
        "orchestrator.model.name",
        "inference.vllm.model",
        "inference.model.name",
    ):
        settings.carry(key, "model.path")
    settings.carry("orchestrator.renderer.name", "model.chat.format", _chat_format, note="auto finds it from the model")
    settings.settle(
        Outcome.NOT_NEEDED, "hpcrl parses thinking and calls by the model's family", "orchestrator.renderer.*"
    )
    for key in ("trainer.dtype", "trainer.model.optimization_dtype"):
        settings.carry(key, "trainer.dtype")


def _chat_format(name: str) -> str | None:
    return None if name in ("default", "auto") else "auto"


def _loop(settings: Settings) -> None:
    settings.carry("max_steps", "trainer.steps", whole)
    for key in ("orchestrator.batch_size", "batch_size"):
        settings.carry(key, "rollouts.rollouts_per_step", whole)
    for key in ("orchestrator.group_size", "orchestrator.rollouts_per_example"):
        settings.carry(key, "rollouts.group_size", whole)
    for key in ("orchestrator.max_off_policy_steps", "max_async_level"):
        settings.carry(key, "rollouts.max_off_policy_steps", int, note=_OFF_POLICY)
    for key in (
        "orchestrator.concurrency.initial_inflight",
        "orchestrator.max_inflight_rollouts",
        "orchestrator.concurrency.max_inflight",
    ):
        settings.carry(key, "rollouts.max_in_flight", whole)
    for prefix in ("orchestrator.sampling", "orchestrator.train.sampling"):
        settings.carry(f"{prefix}.temperature", "rollouts.sampling.temperature")
        for name in ("max_tokens", "max_completion_tokens"):
            settings.carry(f"{prefix}.{name}", "rollouts.sampling.max_new_tokens", whole)
        for name in ("top_p", "top_k", "min_p", "seed"):
            settings.carry(f"{prefix}.{name}", f"rollouts.sampling.{name}")
        for name in ("enable_thinking", "clear_thinking"):
            settings.carry(f"{prefix}.extra_body.chat_template_kwargs.{name}", f"model.chat.variables.{name}")
    settings.carry("orchestrator.eval.interval", "evaluation.every_steps", int)
    settings.carry("ckpt.interval", "checkpoint.every_steps", int)
    settings.carry("ckpt.keep_last", "checkpoint.keep_last", whole)
    settings.carry("seed", "seed", int)


def _trainer(settings: Settings) -> None:
    note = "the budget of packed tokens of a rank; a longer sequence is refused"
    for key in ("seq_len", "model.seq_len", "trainer.model.seq_len", "orchestrator.seq_len"):
        settings.carry(key, "trainer.micro_batch_tokens", whole, note=note)
    if settings.has("seq_len") and not settings.has("inference.vllm.max_model_len", "inference.model.max_model_len"):
        settings.put("engine.max_model_len", settings.get("seq_len"))
    settings.carry(
        "trainer.optim.type", "trainer.optimizer.kind", lambda kind: kind if kind in ("adamw", "muon") else None
    )
    settings.carry("trainer.optim.lr", "trainer.optimizer.learning_rate", float)
    settings.carry("trainer.optim.weight_decay", "trainer.optimizer.weight_decay", float)
    settings.carry("trainer.optim.betas1", "trainer.optimizer.beta1", float)
    settings.carry("trainer.optim.betas2", "trainer.optimizer.beta2", float)
    settings.carry("trainer.optim.max_norm", "trainer.optimizer.max_grad_norm", float)
    settings.carry("trainer.scheduler.type", "trainer.optimizer.schedule")
    settings.carry("trainer.scheduler.warmup_steps", "trainer.optimizer.warmup_steps", int)
    settings.carry("trainer.model.cp", "trainer.parallelism.cp", whole)
    settings.carry("trainer.model.ep", "trainer.parallelism.ep", whole)
    settings.carry("trainer.model.dp_replicate", "trainer.parallelism.dp_replicate", whole)
    settings.carry("trainer.model.fused_lm_head_token_chunk_size", "trainer.memory.lm_head_chunk_tokens", whole)
    settings.carry("trainer.model.fused_lm_head_chunk_size", "trainer.memory.lm_head_chunk_tokens", whole)
    settings.carry("trainer.model.optim_cpu_offload", "trainer.memory.optimizer_offload", bool)
    settings.carry("trainer.model.fsdp_cpu_offload", "trainer.memory.parameter_offload", bool)
    if settings.has("trainer.model.ac", "trainer.model.ac.freq", "trainer.model.ac.mode"):
        settings.put("trainer.memory.activation_checkpointing", "full")
        target = "trainer.memory.activation_checkpointing"
        settings.settle(
            Outcome.CHANGED,
            "hpcrl keeps the input of each layer",
            "trainer.model.ac",
            "trainer.model.ac.*",
            target=target,
        )
    if settings.has("trainer.model.ac_offloading", "trainer.model.ac_offloading.max_inflight_activations"):
        settings.put("trainer.memory.activation_offload", True)
        note = "the bound is memory here: trainer.memory.offload_in_flight_gib"
        settings.settle(
            Outcome.CHANGED, note, "trainer.model.ac_offloading*", target="trainer.memory.activation_offload"
        )
    if settings.has("trainer.model.compile", "trainer.model.compile.fullgraph", "model.compile"):
        settings.put("trainer.memory.compile", True)
        settings.settle(
            Outcome.CARRIED, "", "trainer.model.compile*", "model.compile*", target="trainer.memory.compile"
        )
    if settings.get("trainer.model.quantization.type") == "fp8" or "fp8" in str(
        settings.get("trainer.model.moe.compute.type")
    ):
        settings.put("trainer.precision.fp8", {})
        note = "linears and experts; blocks of 128 x 128"
        keys = ("trainer.model.quantization.*", "trainer.model.moe.compute.type")
        settings.settle(Outcome.CHANGED, note, *keys, target="trainer.precision.fp8")
    for name in ("rank", "alpha"):
        settings.carry(f"trainer.model.lora.{name}", f"trainer.lora.{name}")
    note = "trainer.lora.targets names groups of matrices; there is no dropout"
    settings.settle(Outcome.LOST, note, "trainer.model.lora.*", "orchestrator.model.lora.*")
    settings.carry("trainer.loss.dppo_mask_low", "algorithm.loss.mask_low", float)
    settings.carry("trainer.loss.dppo_mask_high", "algorithm.loss.mask_high", float)
    settings.carry("trainer.loss.kl_tau", "algorithm.loss.kl_tau", float)
    settings.settle(Outcome.LOST, "hpcrl's losses: docs/algorithms.md", "trainer.loss.*")
    settings.settle(
        Outcome.NOT_NEEDED, "hpcrl chooses implementation and kernels", "trainer.model.impl", "trainer.model.attn"
    )


def _engines(settings: Settings) -> None:
    gpus = settings.integer("deployment.gpus_per_node", default=8)
    if nodes := settings.integer("deployment.num_train_nodes"):
        settings.put("trainer.nodes", nodes)
        settings.put("trainer.ranks", nodes * gpus)
        note = f"with {gpus} ranks a node; the cluster profile says how many GPUs a node has"
        settings.settle(
            Outcome.CHANGED, note, "deployment.num_train_nodes", "deployment.gpus_per_node", target="trainer.nodes"
        )
    settings.carry("deployment.num_train_gpus", "trainer.ranks", whole)
    for section, target in (("inference.deployment", "engine"), ("deployment", "engine")):
        for kind in ("prefill", "decode"):
            settings.carry(f"{section}.num_{kind}_replicas", f"{target}.{kind}.replicas", whole)
            settings.carry(f"{section}.{kind}_nodes_per_replica", f"{target}.{kind}.nodes", whole)
            for name in ("max_num_seqs", "max_num_batched_tokens"):
                settings.carry(f"{section}.{kind}_vllm_overrides.{name}", f"{target}.{kind}.{name}", whole)
            _flags(settings, f"{section}.{kind}_vllm_overrides.", f"{target}.{kind}.vllm_args")
    if "prefill" not in settings.recipe["engine"]:
        settings.carry("deployment.num_infer_nodes", "engine.replicas", whole, note="one replica a node")
        settings.carry("deployment.num_infer_gpus", "engine.replicas", whole, note="one replica a GPU, on one node")
    for prefix in ("inference.vllm.", "inference.model.", "inference.parallel.", "inference."):
        for name, target in _ENGINE.items():
            settings.carry(f"{prefix}{name}", target)
    if str(settings.get("inference.vllm.quantization")).startswith("fp8"):
        settings.put("engine.memory.weights", "fp8")
        settings.settle(
            Outcome.CHANGED, "blocks of 128 x 128", "inference.vllm.quantization", target="engine.memory.weights"
        )
    parsers = ("inference.vllm.tool_call_parser", "inference.vllm.reasoning_parser", "inference.model.*_parser")
    settings.settle(Outcome.NOT_NEEDED, "hpcrl parses thinking and calls itself, by the model's family", *parsers)
    note = "hpcrl shares experts out over all ranks of a replica"
    settings.settle(
        Outcome.NOT_NEEDED, note, "inference.vllm.enable_expert_parallel", "inference.enable_expert_parallel"
    )
    _flags(settings, "inference.vllm.", "engine.vllm_args")
    note = "set it in the cluster profile: env, or in vllm_args"
    settings.settle(Outcome.LOST, note, "inference.deployment.*_env_vars.*", "*.env_vars.*", "inference.use_deep_gemm")


def _flags(settings: Settings, prefix: str, target: str) -> None:
    """Carry what is left of a section as flags of vLLM."""
    for key, value in settings.unsettled(prefix):
        if not isinstance(value, list | Mapping):
            flag = key.removeprefix(prefix).replace("_", "-")
            settings.carry(key, f"{target}.{flag}", note="as a flag of vLLM, unchecked")


def _environments(settings: Settings) -> None:
    keys = ("orchestrator.train.source", "orchestrator.train.env", "orchestrator.env", "environment")
    sources: list[Any] = next((settings.get(key) for key in keys if isinstance(settings.get(key), list)), [])
    made = [found for source in sources if (found := _verifiers(source)) is not None]
    if made:
        settings.put("environments", made)
        note = "add python: the interpreter that has verifiers and the package. Held-out tasks are a share of them"
        settings.settle(Outcome.CHANGED, note, *keys, target="environments")
    note = "held-out tasks come from the environments themselves; more sets: evaluation.sets"
    settings.settle(Outcome.LOST, note, "orchestrator.eval.*")


def _verifiers(source: Any) -> dict[str, Any] | None:
    if not isinstance(source, Mapping):
        return None
    inner = source.get("env")
    found = (inner if isinstance(inner, Mapping) else source).get("taskset")
    taskset: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    package = taskset.get("id", source.get("id"))
    if not isinstance(package, str):
        return None
    made: dict[str, Any] = {"name": str(source.get("name") or package).replace("/", "-"), "kind": "verifiers"}
    made["package"] = package
    args = {key: value for key, value in taskset.items() if key != "id"}
    args |= source["args"] if isinstance(source.get("args"), Mapping) else {}
    return made | ({"args": args} if args else {}) | ({"weight": source["weight"]} if "weight" in source else {})


def _rest(settings: Settings) -> None:
    if settings.has("wandb", "wandb.project", "wandb.name", "monitors.wandb.project", "monitors.wandb.name"):
        project = settings.get("wandb.project", "monitors.wandb.project")
        parameters = {"parameters": {"project": project}} if project else {}
        settings.put("sinks", [{"name": "wandb", "sink": "wandb"} | parameters])
        note = "the name of the run is the curve's"
        settings.settle(Outcome.CHANGED, note, "wandb.name", "monitors.wandb.name", target="sinks")
        settings.settle(Outcome.CARRIED, "", "wandb*", "monitors.wandb*", target="sinks")
    note = "hpcrl hands weights over by files of the run (docs/handoff.md)"
    settings.settle(Outcome.NOT_NEEDED, note, "weight_broadcast.*", "trainer.weight_broadcast.*")
    note = "the cluster profile says it"
    settings.settle(
        Outcome.NOT_NEEDED, note, "slurm", "slurm.*", "deployment.type", "inference.deployment.*", "deployment.*"
    )
    note = "hpcrl sets it, or hpcrl logs shows it"
    settings.settle(Outcome.NOT_NEEDED, note, "log.*", "*.log.*", "trainer.dist_timeout_seconds", "output_dir", "clean")
    note = "an empty section: the defaults hold"
    settings.settle(Outcome.NOT_NEEDED, note, "ckpt", "inference", "trainer", "orchestrator", "deployment")
    settings.settle(
        Outcome.LOST, "hpcrl has advantages by group and losses (docs/algorithms.md)", "orchestrator.algo.*"
    )
    note = "hpcrl chooses the router: engine.router"
    settings.settle(Outcome.NOT_NEEDED, note, "inference.router.*")
