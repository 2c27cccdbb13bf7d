"""Files of NeMo-RL (YAML) for GRPO, with a policy on DTensor or Megatron.

Source: NeMo-RL 0.7, ``examples/configs/grpo_math_1B.yaml`` and those that start from it.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.foreign.foreign_settings import Outcome, Settings, positive, whole

_CLIPS = {"low": "loss_fn.ratio_clip_min", "high": "loss_fn.ratio_clip_max"}
_SCHEDULE = "a list of torch's schedulers: say trainer.optimizer.schedule and warmup_steps"


def translate_nemo_rl(settings: Settings) -> None:
    """Fill the recipe from the settings of NeMo-RL."""
    settings.put("engine.backend", "vllm")
    settings.put("engine.dtype", "bfloat16")
    settings.carry("policy.model_name", "model.path")
    settings.carry("policy.precision", "trainer.dtype")
    settings.carry(
        "policy.generation.vllm_cfg.precision", "engine.dtype", lambda dtype: None if dtype == "fp8" else dtype
    )
    _loop(settings)
    _algorithm(settings)
    _trainer(settings)
    _engines(settings)
    _data(settings)


def _loop(settings: Settings) -> None:
    prompts, samples = (settings.integer(f"grpo.num_{name}") for name in ("prompts_per_step", "generations_per_prompt"))
    if prompts and samples:
        rollouts = prompts * samples
        batch = settings.integer("policy.train_global_batch_size", default=rollouts) or rollouts
        settings.put("rollouts.rollouts_per_step", min(batch, rollouts))
        settings.put("rollouts.group_size", samples)
        settings.put("rollouts.max_in_flight", 2 * rollouts)
        note = f"{prompts} prompts x {samples} samples; an optimizer step has {min(batch, rollouts)} of them"
        keys = ("grpo.num_prompts_per_step", "policy.train_global_batch_size")
        settings.settle(Outcome.CHANGED, note, *keys, target="rollouts.rollouts_per_step")
        settings.settle(Outcome.CARRIED, "", "grpo.num_generations_per_prompt", target="rollouts.group_size")
        updates = max(1, rollouts // batch)
        note = f"{updates} optimizer steps for each step of NeMo-RL" if updates > 1 else ""
        settings.carry("grpo.max_num_steps", "trainer.steps", lambda steps: int(steps) * updates, note=note)
    settings.carry("grpo.max_num_steps", "trainer.steps", whole)
    settings.settle(Outcome.LOST, "hpcrl counts optimizer steps: trainer.steps", "grpo.max_num_epochs")
    settings.carry("grpo.val_period", "evaluation.every_steps", lambda steps: max(0, int(steps)))
    settings.carry("grpo.max_val_samples", "evaluation.prompts", whole)
    settings.carry("grpo.seed", "seed", int)
    age = "grpo.async_grpo.max_trajectory_age_steps"
    asynchronous = settings.get("grpo.async_grpo.enabled")
    note = "hpcrl counts from the version of the first sampled token"
    settings.carry(age, "rollouts.max_off_policy_steps", int, note=note)
    note = "hpcrl is always asynchronous; max_off_policy_steps bounds it" if not asynchronous else ""
    outcome = Outcome.CARRIED if asynchronous else Outcome.CHANGED
    settings.settle(outcome, note, "grpo.async_grpo.enabled", target="rollouts.max_off_policy_steps")
    settings.settle(Outcome.LOST, "turns are an environment's", "grpo.max_rollout_turns")
    settings.carry("checkpointing.save_period", "checkpoint.every_steps", whole)
    note = "hpcrl keeps the newest entries; the best by reward is not chosen"
    settings.carry("checkpointing.keep_top_k", "checkpoint.keep_last", whole, note=note)
    settings.settle(Outcome.NOT_NEEDED, "each run has checkpoints in its directory", "checkpointing.*")
    settings.settle(Outcome.NOT_NEEDED, "the first and the last version are always evaluated", "grpo.val_*")


def _algorithm(settings: Settings) -> None:
    normalised = settings.get("grpo.normalize_rewards", "grpo.adv_estimator.normalize_rewards", default=True)
    settings.put("algorithm.advantage", "grpo" if normalised else "mean_baseline")
    settings.settle(Outcome.CARRIED, "", "grpo.normalize_rewards", target="algorithm.advantage")
    note = "the mean of the group includes the rollout itself, which makes advantages smaller by (n-1)/n"
    settings.settle(Outcome.CHANGED, note, "grpo.use_leave_one_out_baseline", target="algorithm.advantage")
    settings.put(
        "algorithm.loss.kind", "gspo" if settings.get("loss_fn.sequence_level_importance_ratios") else "ppo_clip"
    )
    settings.settle(Outcome.CARRIED, "", "loss_fn.sequence_level_importance_ratios", target="algorithm.loss.kind")
    for side, key in _CLIPS.items():
        settings.carry(key, f"algorithm.loss.clip_{side}", positive)
    if settings.number("loss_fn.reference_policy_kl_penalty"):
        settings.carry("loss_fn.reference_policy_kl_penalty", "algorithm.kl.coefficient", float)
        settings.put("algorithm.kl.estimator", "k3")
    settings.settle(Outcome.NOT_NEEDED, "it is 0", "loss_fn.reference_policy_kl_penalty")
    note = "the ratio is always from the engine's own log-probabilities"
    settings.settle(Outcome.NOT_NEEDED, note, "loss_fn.use_importance_sampling_correction", "loss_fn.use_on_policy_kl*")
    note = "hpcrl divides by the tokens of the batch (docs/algorithms.md)"
    tokens = settings.get("loss_fn.token_level_loss", default=True)
    settings.settle(Outcome.NOT_NEEDED if tokens else Outcome.LOST, note, "loss_fn.token_level_loss")
    settings.settle(Outcome.LOST, "hpcrl's losses: docs/algorithms.md", "loss_fn.*")
    settings.settle(Outcome.LOST, "hpcrl has no such filter", "grpo.*")


def _trainer(settings: Settings) -> None:
    megatron = settings.get("policy.megatron_cfg.enabled", default=False)
    part, optimizer = (
        ("policy.megatron_cfg", "policy.megatron_cfg.optimizer")
        if megatron
        else ("policy.dtensor_cfg", "policy.optimizer.kwargs")
    )
    settings.carry(f"{optimizer}.lr", "trainer.optimizer.learning_rate", positive)
    settings.carry(f"{optimizer}.weight_decay", "trainer.optimizer.weight_decay", float)
    for number, name in enumerate(("beta1", "beta2")):
        settings.carry(f"{optimizer}.adam_{name}", f"trainer.optimizer.{name}", float)
        if isinstance(betas := settings.get(f"{optimizer}.betas"), list) and len(betas) == 2:
            settings.put(f"trainer.optimizer.{name}", betas[number])
    settings.settle(Outcome.CARRIED, "", f"{optimizer}.betas", target="trainer.optimizer.beta1")
    settings.carry("policy.max_grad_norm", "trainer.optimizer.max_grad_norm", positive)
    settings.carry(
        "policy.megatron_cfg.scheduler.lr_warmup_iters" if megatron else "", "trainer.optimizer.warmup_steps", int
    )
    settings.settle(Outcome.LOST, _SCHEDULE, "policy.scheduler", "policy.scheduler.*")
    settings.carry(f"{part}.context_parallel_size", "trainer.parallelism.cp", whole)
    settings.carry(f"{part}.expert_model_parallel_size", "trainer.parallelism.ep", whole)
    settings.carry(f"{part}.expert_parallel_size", "trainer.parallelism.ep", whole)
    settings.carry(
        f"{part}.activation_checkpointing",
        "trainer.memory.activation_checkpointing",
        lambda on: "full" if on else "none",
    )
    settings.carry(f"{part}.cpu_offload", "trainer.memory.parameter_offload", bool)
    for key in ("tensor_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"):
        single = settings.get(f"{part}.{key}", default=1) == 1
        note = "it is 1" if single else "hpcrl shards by FSDP2, with expert and context parallelism (docs/training.md)"
        settings.settle(Outcome.NOT_NEEDED if single else Outcome.LOST, note, f"{part}.{key}")
    if settings.get(f"{part}.lora_cfg.enabled"):
        settings.carry(f"{part}.lora_cfg.dim", "trainer.lora.rank", whole)
        settings.carry(f"{part}.lora_cfg.alpha", "trainer.lora.alpha", positive)
    if settings.get(f"{part}.fp8_cfg.enabled"):
        settings.put("trainer.precision.fp8", {})
        note = "blocks of 128 x 128"
        settings.settle(Outcome.CHANGED, note, f"{part}.fp8_cfg.*", target="trainer.precision.fp8")
    tokens = settings.integer("policy.sequence_packing.train_mb_tokens")
    length, batch = (
        settings.integer("policy.max_total_sequence_length"),
        settings.integer("policy.train_micro_batch_size", default=1),
    )
    if tokens or length:
        settings.put("trainer.micro_batch_tokens", tokens or length * batch)
        keys = ("policy.sequence_packing.train_mb_tokens", "policy.train_micro_batch_size")
        settings.settle(
            Outcome.CHANGED, "the budget of packed tokens of a rank", *keys, target="trainer.micro_batch_tokens"
        )
    used = "policy.dtensor_cfg.*" if megatron else "policy.megatron_cfg.*"
    settings.settle(Outcome.NOT_NEEDED, "the backend is not enabled", used, "policy.optimizer.*" if megatron else used)
    settings.settle(Outcome.NOT_NEEDED, "hpcrl decides it", "policy.sequence_packing.*", "policy.dynamic_batching.*")


def _engines(settings: Settings) -> None:
    generation = "policy.generation"
    for name in ("temperature", "top_p"):
        settings.carry(f"{generation}.{name}", f"rollouts.sampling.{name}", positive)
    settings.carry(f"{generation}.top_k", "rollouts.sampling.top_k", lambda most: max(0, int(most)))
    settings.carry(f"{generation}.stop_strings", "rollouts.sampling.stop")
    settings.carry(f"{generation}.stop_token_ids", "rollouts.sampling.stop_token_ids")
    settings.carry("policy.max_total_sequence_length", "engine.max_model_len", whole)
    settings.carry(f"{generation}.max_new_tokens", "rollouts.sampling.max_new_tokens", whole)
    settings.carry(f"{generation}.vllm_cfg.max_model_len", "engine.max_model_len", whole)
    settings.carry(f"{generation}.vllm_cfg.tensor_parallel_size", "engine.tp", whole)
    target = "engine.memory.gpu_memory_utilization"
    settings.carry(f"{generation}.vllm_cfg.gpu_memory_utilization", target, positive)
    nodes, gpus = settings.integer("cluster.num_nodes"), settings.integer("cluster.gpus_per_node")
    apart = settings.get(f"{generation}.colocated.enabled") is False
    serving = settings.integer(f"{generation}.colocated.resources.num_nodes") if apart else 0
    if nodes and gpus:
        training = max(1, nodes - serving)
        settings.put("trainer.nodes", training)
        settings.put("trainer.ranks", training * gpus)
        if serving:
            settings.put("engine.replicas", serving)
        note = f"{training} nodes train" + (
            f", {serving} serve, one replica on each" if serving else "; engines need nodes, or engine.placement"
        )
        keys = ("cluster.num_nodes", "cluster.gpus_per_node", f"{generation}.colocated.*")
        settings.settle(Outcome.CHANGED, note, *keys, target="trainer.nodes")
    note = "give flags of vLLM in engine.vllm_args"
    settings.settle(Outcome.LOST, note, f"{generation}.vllm_kwargs", f"{generation}.vllm_kwargs.*")
    settings.settle(Outcome.NOT_NEEDED, "hpcrl decides it", f"{generation}.*", "policy.*")


def _data(settings: Settings) -> None:
    path = settings.get("data.train_data_path", "data.train.data_path")
    if isinstance(path, str):
        columns = {
            "prompt": settings.get("data.input_key", default="input"),
            "answer": settings.get("data.output_key", default="output"),
        }
        environment: dict[str, Any] = {
            "name": "questions",
            "kind": "dataset",
            "columns": columns,
            "rewards": [{"kind": "math"}],
        }
        held_out = settings.get("data.val_data_path", "data.validation.data_path")
        environment |= {"path": path} | ({"held_out_path": held_out} if isinstance(held_out, str) else {})
        settings.put("environments", [environment])
        note = "the checker is yours to choose (docs/environments.md)"
        settings.settle(Outcome.CHANGED, note, "data.*", "env.*", target="environments")
    note = "name your questions as an environment: kind: dataset with path or hub (docs/environments.md)"
    settings.settle(Outcome.LOST, note, "data.*", "env.*")
    known = [name for name in ("wandb", "tensorboard", "mlflow") if settings.get(f"logger.{name}_enabled")]
    if known:
        project = settings.get("logger.wandb.project")
        made = [
            {"name": name, "sink": name} | ({"parameters": {"project": project}} if name == "wandb" and project else {})
            for name in known
        ]
        settings.put("sinks", made)
    settings.settle(
        Outcome.CARRIED if known else Outcome.NOT_NEEDED, "", "logger.*_enabled", target="sinks" if known else ""
    )
    settings.settle(Outcome.NOT_NEEDED, "a run writes its metrics in any case; see sinks", "logger.*")
    settings.settle(Outcome.NOT_NEEDED, "the cluster profile says it", "cluster.*")
    note = "hpcrl's own: finished rollouts (rollouts.warehouse), failures (rollouts.failures) and supervision"
    settings.settle(Outcome.NOT_NEEDED, note, "data_plane.*", "async_rl.*")
    settings.settle(Outcome.LOST, "a penalty is a checker of the environment", "reward_penalties.*")
    note = "a teacher is algorithm.distillation"
    settings.settle(Outcome.LOST, note, "on_policy_distillation", "on_policy_distillation.*", "distillation.*")
