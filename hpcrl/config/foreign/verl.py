"""Settings of verl (Hydra YAML, or ``key=value`` arguments of ``verl.trainer.main_ppo``) with an actor on FSDP.

Source: verl 0.9, ``verl/trainer/config/ppo_trainer.yaml`` and what it includes.
"""

from __future__ import annotations

from typing import Any

from hpcrl.config.foreign.foreign_settings import Outcome, Settings, positive, whole

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_NO_CRITIC = "hpcrl has no critic: advantages are those of groups (grpo, mean_baseline, or a function of yours)"
_LOSSES = {"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}


def translate_verl(settings: Settings) -> None:
    """Fill the recipe from the settings of verl."""
    settings.put("engine.backend", "vllm")
    settings.put("trainer.dtype", "bfloat16")
    settings.put("engine.dtype", "bfloat16")
    settings.carry(f"{MODEL}.path", "model.path")
    _batches(settings)
    _data(settings)
    _algorithm(settings)
    _optimizer(settings)
    _memory(settings)
    _engines(settings)
    _rest(settings)


def _batches(settings: Settings) -> None:
    """Translate batches: a mini-batch of verl is an optimizer step, and so is a step of hpcrl."""
    samples = settings.integer(f"{ROLLOUT}.n", default=1)
    settings.carry(f"{ROLLOUT}.n", "rollouts.group_size", whole)
    prompts = settings.integer("data.train_batch_size")
    mini = settings.integer(f"{ACTOR}.ppo_mini_batch_size", default=prompts) or prompts
    updates = max(1, prompts // mini) if mini else 1
    if mini:
        settings.put("rollouts.rollouts_per_step", mini * samples)
        note = f"{mini} prompts x {samples} samples: an optimizer step of verl is one mini-batch"
        keys = ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
        settings.settle(Outcome.CHANGED, note, *keys, target="rollouts.rollouts_per_step")
        settings.put("rollouts.max_in_flight", 2 * prompts * samples)
    if updates > 1:
        settings.put("rollouts.max_off_policy_steps", max(4, updates))
    note = f"{updates} optimizer steps for each step of verl" if updates > 1 else ""
    settings.carry("trainer.total_training_steps", "trainer.steps", lambda steps: _steps(steps, updates), note=note)
    settings.settle(Outcome.LOST, "hpcrl counts optimizer steps: trainer.steps", "trainer.total_epochs")
    settings.carry("trainer.save_freq", "checkpoint.every_steps", lambda every: _every(every, updates), note=note)
    settings.carry("trainer.test_freq", "evaluation.every_steps", lambda every: _every(every, updates), note=note)
    settings.carry("trainer.max_actor_ckpt_to_keep", "checkpoint.keep_last", whole)


def _steps(steps: Any, updates: int) -> int | None:
    return int(steps) * updates if int(steps) > 0 else None


def _every(steps: Any, updates: int) -> int:
    return int(steps) * updates if int(steps) > 0 else 0


def _data(settings: Settings) -> None:
    for name in ("temperature", "top_p"):
        settings.carry(f"{ROLLOUT}.{name}", f"rollouts.sampling.{name}", positive)
    settings.carry(f"{ROLLOUT}.top_k", "rollouts.sampling.top_k", lambda most: max(0, int(most)))
    for name in ("temperature", "top_p"):
        settings.carry(f"{ROLLOUT}.val_kwargs.{name}", f"evaluation.sampling.{name}", float)
    settings.carry("data.max_response_length", "rollouts.sampling.max_new_tokens", whole)
    prompt, answer = settings.integer("data.max_prompt_length"), settings.integer("data.max_response_length")
    if prompt and answer:
        settings.put("engine.max_model_len", prompt + answer)
        note = "prompt and response together"
        settings.settle(Outcome.CHANGED, note, "data.max_prompt_length", target="engine.max_model_len")
    settings.carry(f"{ROLLOUT}.max_model_len", "engine.max_model_len", whole)
    train, held_out = (_one(settings.get(f"data.{name}")) for name in ("train_files", "val_files"))
    if train is not None:
        environment: dict[str, Any] = {"name": "questions", "kind": "dataset", "path": train}
        environment |= {} if held_out is None else {"held_out_path": held_out}
        environment["columns"] = {"messages": str(settings.get("data.prompt_key", default="prompt"))}
        environment["rewards"] = [{"kind": "math"}]
        settings.put("environments", [environment])
        note = (
            "a guess: the answer is a column of its own here (columns.answer; verl has it inside reward_model), and "
            "the checker is yours to choose (docs/environments.md)"
        )
        keys = ("data.train_files", "data.val_files", "data.prompt_key")
        settings.settle(Outcome.CHANGED, note, *keys, target="environments")
    note = "a function of yours is a checker: {kind: function, function: 'package.module:name'}"
    settings.settle(Outcome.LOST, note, "custom_reward_function.*", "reward.*")
    settings.settle(Outcome.LOST, "hpcrl has no reward model as a role", "reward_model.*")
    note = "tools and turns are an environment's (docs/environments.md)"
    settings.settle(Outcome.LOST, note, f"{ROLLOUT}.multi_turn.*", f"{ROLLOUT}.agent.*")
    settings.settle(Outcome.NOT_NEEDED, "hpcrl reads and shuffles tasks itself", "data.*")


def _one(files: Any) -> str | None:
    if isinstance(files, list):
        return str(files[0]) if len(files) == 1 else None
    return str(files) if files else None


def _algorithm(settings: Settings) -> None:
    estimator = settings.get("algorithm.adv_estimator")
    if estimator == "grpo":
        divided = settings.get("algorithm.norm_adv_by_std_in_grpo", default=True)
        settings.put("algorithm.advantage", "grpo" if divided else "mean_baseline")
        keys = ("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo")
        settings.settle(Outcome.CARRIED, "", *keys, target="algorithm.advantage")
    elif estimator is not None:
        settings.settle(Outcome.LOST, _NO_CRITIC, "algorithm.adv_estimator")
    mode = settings.get(f"{ACTOR}.policy_loss.loss_mode", default="vanilla")
    if (kind := _LOSSES.get(str(mode))) is None:
        settings.settle(Outcome.LOST, "hpcrl's losses: docs/algorithms.md", f"{ACTOR}.policy_loss.loss_mode")
    else:
        settings.put("algorithm.loss.kind", kind)
        settings.settle(Outcome.CARRIED, "", f"{ACTOR}.policy_loss.loss_mode", target="algorithm.loss.kind")
        for side in ("low", "high"):
            settings.carry(f"{ACTOR}.clip_ratio_{side}", f"algorithm.loss.clip_{side}", positive)
        both = f"{ACTOR}.clip_ratio"
        if not settings.has(f"{both}_low", f"{both}_high") and (width := settings.number(both)):
            for side in ("low", "high"):
                settings.put(f"algorithm.loss.clip_{side}", width)
        settings.settle(Outcome.CARRIED, "", both, target="algorithm.loss.clip_low")
    settings.settle(Outcome.LOST, "hpcrl's losses have no second clip of negative advantages", f"{ACTOR}.clip_ratio_c")
    _divergence(settings)
    note = "hpcrl divides by the tokens of the batch (docs/algorithms.md)"
    same = settings.get(f"{ACTOR}.loss_agg_mode") in (None, "token-mean")
    settings.settle(Outcome.NOT_NEEDED if same else Outcome.LOST, note, f"{ACTOR}.loss_agg_mode")
    if settings.number(f"{ACTOR}.entropy_coeff"):
        settings.settle(Outcome.LOST, "hpcrl's losses have no entropy bonus", f"{ACTOR}.entropy_coeff")
    settings.settle(Outcome.NOT_NEEDED, "it is 0", f"{ACTOR}.entropy_coeff")
    settings.settle(Outcome.LOST, _NO_CRITIC, "critic.*", "algorithm.gamma", "algorithm.lam", "trainer.critic_warmup")
    if settings.integer(f"{ACTOR}.ppo_epochs", default=1) > 1:
        settings.settle(Outcome.LOST, "hpcrl trains each rollout once", f"{ACTOR}.ppo_epochs")
    settings.settle(Outcome.NOT_NEEDED, "hpcrl trains each rollout once", f"{ACTOR}.ppo_epochs", f"{ACTOR}.shuffle")


def _divergence(settings: Settings) -> None:
    in_loss, in_reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if settings.get(in_loss):
        settings.carry(f"{ACTOR}.kl_loss_coef", "algorithm.kl.coefficient", float)
        settings.put("algorithm.kl.estimator", "k3")
        note = "hpcrl has k3 (low_var_kl) and weighted_k3"
        low = settings.get(f"{ACTOR}.kl_loss_type") == "low_var_kl"
        outcome = Outcome.CARRIED if low else Outcome.CHANGED
        settings.settle(outcome, "" if low else note, f"{ACTOR}.kl_loss_type", in_loss, target="algorithm.kl.estimator")
    elif settings.get(in_reward):
        settings.carry("algorithm.kl_ctrl.kl_coef", "algorithm.kl.coefficient", float)
        settings.put("algorithm.kl.applied_to", "reward")
        settings.settle(Outcome.CARRIED, "", in_reward, target="algorithm.kl.applied_to")
    note = "there is no penalty on the distance from a reference"
    settings.settle(Outcome.NOT_NEEDED, note, in_loss, f"{ACTOR}.kl_loss_*", in_reward, "algorithm.kl_*")
    settings.settle(Outcome.NOT_NEEDED, "the reference is computed as the policy is", "actor_rollout_ref.ref.*")


def _optimizer(settings: Settings) -> None:
    settings.carry(f"{ACTOR}.optim.lr", "trainer.optimizer.learning_rate", positive)
    settings.carry(f"{ACTOR}.optim.weight_decay", "trainer.optimizer.weight_decay", float)
    for key in ("lr_scheduler_type", "warmup_style"):
        settings.carry(f"{ACTOR}.optim.{key}", "trainer.optimizer.schedule")
    settings.carry(f"{ACTOR}.optim.lr_warmup_steps", "trainer.optimizer.warmup_steps", lambda steps: max(0, int(steps)))
    settings.carry(f"{ACTOR}.grad_clip", "trainer.optimizer.max_grad_norm", positive)
    settings.settle(Outcome.NOT_NEEDED, "it is 0: say warmup_steps", f"{ACTOR}.optim.lr_warmup_steps_ratio")
    betas = settings.get(f"{ACTOR}.optim.betas")
    if isinstance(betas, list) and len(betas) == 2:
        settings.put("trainer.optimizer.beta1", betas[0])
        settings.put("trainer.optimizer.beta2", betas[1])
        settings.settle(Outcome.CARRIED, "", f"{ACTOR}.optim.betas", target="trainer.optimizer.beta1")
    else:
        # torch's defaults, which verl has where it says nothing
        settings.put("trainer.optimizer.beta2", 0.999)


def _memory(settings: Settings) -> None:
    note = "the budget of packed tokens of a rank"
    settings.carry(f"{ACTOR}.ppo_max_token_len_per_gpu", "trainer.micro_batch_tokens", whole, note=note)
    settings.carry(f"{ACTOR}.ulysses_sequence_parallel_size", "trainer.parallelism.cp", whole)
    checkpointing = f"{MODEL}.enable_gradient_checkpointing"
    settings.carry(checkpointing, "trainer.memory.activation_checkpointing", lambda on: "full" if on else "none")
    settings.carry(f"{MODEL}.enable_activation_offload", "trainer.memory.activation_offload", bool)
    settings.carry(f"{ACTOR}.fsdp_config.param_offload", "trainer.memory.parameter_offload", bool)
    settings.carry(f"{ACTOR}.fsdp_config.optimizer_offload", "trainer.memory.optimizer_offload", bool)
    if settings.integer(f"{MODEL}.lora_rank"):
        settings.carry(f"{MODEL}.lora_rank", "trainer.lora.rank", whole)
        settings.carry(f"{MODEL}.lora_alpha", "trainer.lora.alpha", positive)
        note = "hpcrl names groups of matrices: attention, mlp, shared_experts, experts"
        settings.settle(Outcome.LOST, note, f"{MODEL}.target_modules", f"{MODEL}.exclude_modules")
    settings.settle(Outcome.NOT_NEEDED, "there are no adapters", f"{MODEL}.lora_*", f"{MODEL}.*_modules")
    note = "hpcrl packs rollouts into trainer.micro_batch_tokens"
    settings.settle(
        Outcome.NOT_NEEDED,
        note,
        f"{ACTOR}.ppo_micro_batch_size*",
        f"{ACTOR}.use_dynamic_bsz",
        f"{MODEL}.use_remove_padding",
    )
    note = "FSDP2 over all ranks; see trainer.parallelism"
    settings.settle(Outcome.NOT_NEEDED, note, f"{ACTOR}.fsdp_config.*", f"{ACTOR}.strategy")


def _engines(settings: Settings) -> None:
    nodes, gpus = (settings.integer(f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    if nodes and gpus:
        settings.put("trainer.nodes", nodes)
        settings.put("trainer.ranks", nodes * gpus)
        note = "the same GPUs train and serve in verl; here engines have nodes of their own, or engine.placement"
        settings.settle(Outcome.CHANGED, note, "trainer.nnodes", "trainer.n_gpus_per_node", target="trainer.nodes")
    settings.carry(f"{ROLLOUT}.tensor_model_parallel_size", "engine.tp", whole)
    settings.carry(f"{ROLLOUT}.gpu_memory_utilization", "engine.memory.gpu_memory_utilization", positive)
    settings.carry(f"{ROLLOUT}.max_num_seqs", "engine.max_num_seqs", whole)
    settings.carry(f"{ROLLOUT}.max_num_batched_tokens", "engine.max_num_batched_tokens", whole)
    settings.carry(f"{ROLLOUT}.dtype", "engine.dtype")
    if settings.get(f"{ROLLOUT}.name") not in (None, "vllm"):
        settings.settle(Outcome.LOST, "hpcrl's engines are vLLM", f"{ROLLOUT}.name")
    settings.settle(Outcome.NOT_NEEDED, "engines are vLLM, asynchronous", f"{ROLLOUT}.name", f"{ROLLOUT}.mode")
    note = "give flags of vLLM in engine.vllm_args"
    settings.settle(Outcome.LOST, note, f"{ROLLOUT}.engine_kwargs.*", f"{ROLLOUT}.enforce_eager")
    settings.settle(
        Outcome.NOT_NEEDED, "hpcrl decides it", f"{ROLLOUT}.*", f"{MODEL}.*", f"{ACTOR}.*", "actor_rollout_ref.*"
    )


def _rest(settings: Settings) -> None:
    loggers = settings.get("trainer.logger", default=[])
    named = loggers if isinstance(loggers, list | str) else []
    known = [name for name in ("wandb", "tensorboard", "mlflow", "trackio") if name in named]
    if known:
        project = settings.get("trainer.project_name")
        parameters = {"parameters": {"project": project}} if project else {}
        settings.put(
            "sinks", [{"name": name, "sink": name, **(parameters if name == "wandb" else {})} for name in known]
        )
        settings.settle(Outcome.CARRIED, "", "trainer.logger", "trainer.project_name", target="sinks")
    note = "algorithm.loss: tis, icepop or masked_ratio are such corrections (docs/algorithms.md)"
    settings.settle(Outcome.LOST, note, "algorithm.rollout_correction.*")
    settings.settle(
        Outcome.LOST, "hpcrl has no such setting", "reward_manager.*", "algorithm.pf_ppo.*", "algorithm.filter_groups.*"
    )
    note = "it is null, or hpcrl decides it"
    settings.settle(Outcome.NOT_NEEDED, note, "algorithm.*", "transfer_queue.*", "*._target_", "hydra.*", "defaults")
    note = "a run has a name, a directory and attempts: hpcrl submit --name, hpcrl resume"
    keys = ("trainer.experiment_name", "trainer.project_name", "trainer.resume_*", "trainer.default_*", "trainer.val_*")
    settings.settle(Outcome.NOT_NEEDED, note, *keys)
    settings.settle(
        Outcome.NOT_NEEDED, "hpcrl has no Ray", "ray_kwargs.*", "ray_init.*", "trainer.*", "global_profiler.*"
    )
