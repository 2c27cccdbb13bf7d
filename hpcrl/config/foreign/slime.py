"""Flags of slime (a script ``run-….sh``, or the flags alone), with Megatron and SGLang. miles takes the same flags.

Source: slime 0.3, ``slime/utils/arguments.py`` and ``scripts/``.
"""

from __future__ import annotations

import re
import shlex
from functools import partial
from typing import Any

from hpcrl.config.foreign.foreign_settings import Outcome, Settings, positive, whole

_PROMPT = 2048
"""Tokens of a prompt where the flags have no maximum."""
_CHAIN = 4
"""Maximum number of variables behind each other."""
_CHECKERS = {"math": "math", "dapo": "math", "deepscaler": "math"}
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=([\"']?[^\s\"'`$()]*[\"']?)\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ARRAY = re.compile(r"\$\{\w+\[@\]\}")
_PARALLEL = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "expert-tensor-parallel-size")


def read_flags(text: str) -> dict[str, Any]:
    """Return the flags of a script: its arrays ``NAME_ARGS=( … )`` and what is given to ``train.py``.

    A flag without a value is True; with several values it is a list. Comments are left out, and nothing is executed.
    """
    found: dict[str, Any] = {}
    plain = with_values(text)
    arrays = re.findall(r"^\s*\w+=\((.*?)^\s*\)", plain, re.MULTILINE | re.DOTALL)
    command = re.search(r"train(?:_async)?\.py\b(.*)", plain, re.DOTALL)
    parts = [*arrays, *([command.group(1).replace("\\\n", " ")] if command else [])]
    for part in parts or [plain]:
        for name, values in _flags_of(part):
            found[name] = True if not values else values[0] if len(values) == 1 else values
    return found


def with_values(text: str) -> str:
    """Return a script without comments, in which variables with a plain value in the script are that value.

    ``NAME=value`` and ``${NAME:-default}`` count; what a command or a sum gives stays as it is.
    """
    plain = "\n".join(re.sub(r"(^|\s)#.*", "", line) for line in text.splitlines())
    plain = re.sub(r"\$\{(\w+):-([^}$`]*)\}", r"\2", plain)
    for _ in range(_CHAIN):
        known = dict(_ASSIGNED.findall(plain))
        plain = _VARIABLE.sub(partial(_unquoted, known), plain)
    return plain


def _unquoted(known: dict[str, str], found: re.Match[str]) -> str:
    return known.get(found[1] or found[2], found[0]).strip("\"'")


def _flags_of(text: str) -> list[tuple[str, list[Any]]]:
    try:
        words = shlex.split(text)
    except ValueError:
        # a quote that is not closed, as in a substitution that was cut
        words = text.split()
    found: list[tuple[str, list[Any]]] = []
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            found.append((name, [_number(value)] if given else []))
        elif found and not _ARRAY.fullmatch(word):
            found[-1][1].append(_number(word))
    return found


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def translate_slime(settings: Settings) -> None:
    """Fill the recipe from flags of slime."""
    settings.put("engine.backend", "vllm")
    settings.put("trainer.dtype", "bfloat16")
    settings.put("engine.dtype", "bfloat16")
    settings.carry("hf-checkpoint", "model.path")
    note = "hpcrl trains from the Hugging Face directory itself, without a conversion"
    settings.settle(Outcome.NOT_NEEDED, note, "ref-load", "load", "save", "megatron-to-hf-mode", "model-name")
    _loop(settings)
    _algorithm(settings)
    _trainer(settings)
    _engines(settings)
    _data(settings)


def _loop(settings: Settings) -> None:
    prompts, samples = settings.integer("rollout-batch-size"), settings.integer("n-samples-per-prompt", default=1)
    settings.carry("n-samples-per-prompt", "rollouts.group_size", whole)
    updates = 1
    if prompts:
        rollouts = prompts * samples
        batch = settings.integer("global-batch-size", default=rollouts) or rollouts
        updates = max(1, rollouts // batch) if batch else 1
        settings.put("rollouts.rollouts_per_step", batch)
        settings.put("rollouts.max_in_flight", 2 * rollouts)
        note = f"{prompts} prompts x {samples} samples; an optimizer step has {batch} of them"
        target = "rollouts.rollouts_per_step"
        settings.settle(
            Outcome.CHANGED, note, "rollout-batch-size", "global-batch-size", "num-steps-per-rollout", target=target
        )
    note = f"{updates} optimizer steps for each rollout step of slime" if updates > 1 else ""
    settings.carry("num-rollout", "trainer.steps", lambda steps: int(steps) * updates, note=note)
    settings.carry("save-interval", "checkpoint.every_steps", lambda steps: int(steps) * updates, note=note)
    settings.carry("eval-interval", "evaluation.every_steps", lambda steps: int(steps) * updates, note=note)
    for flag, name in (("temperature", "temperature"), ("top-p", "top_p"), ("top-k", "top_k")):
        settings.carry(
            f"rollout-{flag}", f"rollouts.sampling.{name}", float if name != "top_k" else lambda most: max(0, int(most))
        )
        settings.carry(
            f"eval-{flag}", f"evaluation.sampling.{name}", float if name != "top_k" else lambda most: max(0, int(most))
        )
    answer = settings.integer("rollout-max-response-len")
    if answer and not settings.has("rollout-max-context-len", "sglang-context-length"):
        prompt = settings.integer("rollout-max-prompt-len", default=_PROMPT)
        settings.put("engine.max_model_len", answer + prompt)
        settings.settle(Outcome.CARRIED, "", "rollout-max-prompt-len", target="engine.max_model_len")
    note = f"engine.max_model_len has {_PROMPT:,} tokens more, for the prompt, where the flags do not say it"
    settings.carry("rollout-max-response-len", "rollouts.sampling.max_new_tokens", whole, note=note)
    settings.carry("eval-max-response-len", "evaluation.sampling.max_new_tokens", whole)
    settings.carry("rollout-max-context-len", "engine.max_model_len", whole)
    settings.carry("seed", "seed", int)
    settings.carry(
        "rollout-stop-token-ids",
        "rollouts.sampling.stop_token_ids",
        lambda ids: ids if isinstance(ids, list) else [ids],
    )
    settings.carry("rollout-seed", "rollouts.sampling.seed", int)


def _algorithm(settings: Settings) -> None:
    estimator = settings.get("advantage-estimator", default="grpo")
    named = {"grpo": "ppo_clip", "gspo": "gspo", "cispo": "cispo"}.get(str(estimator))
    if named is None:
        note = "hpcrl has grpo and mean_baseline, and a function of yours; no critic"
        settings.settle(Outcome.LOST, note, "advantage-estimator")
    else:
        divided = not settings.has("disable-grpo-std-normalization")
        settings.put("algorithm.advantage", "grpo" if divided else "mean_baseline")
        keys = ("advantage-estimator", "disable-grpo-std-normalization")
        settings.settle(Outcome.CARRIED, "", *keys, target="algorithm.advantage")
    kind = "tis" if settings.has("use-tis") and named in (None, "ppo_clip") else named or "ppo_clip"
    settings.put("algorithm.loss.kind", kind)
    note = "the ratio from the engine's log-probabilities is cut for each token: algorithm.loss.ratio_high"
    settings.settle(Outcome.CHANGED, note, "use-tis", "tis-*", target="algorithm.loss.kind")
    settings.carry("eps-clip", "algorithm.loss.clip_low", positive)
    if high := settings.number("eps-clip-high", "eps-clip"):
        settings.put("algorithm.loss.clip_high", high)
        settings.settle(Outcome.CARRIED, "", "eps-clip-high", target="algorithm.loss.clip_high")
    coefficient = settings.number("kl-loss-coef")
    if settings.has("use-kl-loss") and coefficient:
        settings.put("algorithm.kl", {"coefficient": coefficient, "estimator": "k3"})
        settings.settle(Outcome.CARRIED, "", "use-kl-loss", "kl-loss-*", target="algorithm.kl")
    elif penalty := settings.number("kl-coef"):
        settings.put("algorithm.kl", {"coefficient": penalty, "applied_to": "reward"})
        settings.settle(Outcome.CARRIED, "", "kl-coef", target="algorithm.kl")
    settings.settle(Outcome.NOT_NEEDED, "its weight is 0", "use-kl-loss", "kl-loss-*", "kl-coef")
    if settings.number("entropy-coef"):
        settings.settle(Outcome.LOST, "hpcrl's losses have no entropy bonus", "entropy-coef")
    settings.settle(Outcome.NOT_NEEDED, "it is 0", "entropy-coef")
    if settings.has("use-rollout-routing-replay"):
        settings.put("trainer.router_replay", True)
        settings.put("engine.return_routed_experts", True)
        settings.settle(Outcome.CARRIED, "", "use-rollout-routing-replay", target="trainer.router_replay")
    note = "keep them: rollouts.zero_variance: drop leaves out groups without a difference, and samples no others"
    settings.settle(Outcome.LOST, note, "over-sampling-batch-size", "dynamic-sampling-filter-path")


def _trainer(settings: Settings) -> None:
    nodes, gpus = settings.integer("actor-num-nodes"), settings.integer("actor-num-gpus-per-node", default=8)
    if nodes:
        settings.put("trainer.nodes", nodes)
        settings.put("trainer.ranks", nodes * gpus)
        target = "trainer.nodes"
        settings.settle(Outcome.CARRIED, "", "actor-num-nodes", "actor-num-gpus-per-node", target=target)
    note = "engines have nodes of their own here; or engine.placement"
    settings.settle(Outcome.LOST, note, "colocate")
    settings.carry("optimizer", "trainer.optimizer.kind", lambda kind: {"adam": "adamw", "muon": "muon"}.get(str(kind)))
    settings.carry("lr", "trainer.optimizer.learning_rate", positive)
    settings.carry("weight-decay", "trainer.optimizer.weight_decay", float)
    settings.carry("adam-beta1", "trainer.optimizer.beta1", float)
    settings.carry("adam-beta2", "trainer.optimizer.beta2", float)
    settings.carry("clip-grad", "trainer.optimizer.max_grad_norm", positive)
    settings.carry("lr-decay-style", "trainer.optimizer.schedule")
    settings.carry("lr-warmup-iters", "trainer.optimizer.warmup_steps", int)
    settings.carry("context-parallel-size", "trainer.parallelism.cp", whole)
    settings.carry("expert-model-parallel-size", "trainer.parallelism.ep", whole)
    settings.carry(
        "max-tokens-per-gpu", "trainer.micro_batch_tokens", whole, note="the budget of packed tokens of a rank"
    )
    settings.carry("optimizer-cpu-offload", "trainer.memory.optimizer_offload", bool)
    if settings.has("recompute-granularity"):
        full = settings.get("recompute-granularity") == "full"
        settings.put("trainer.memory.activation_checkpointing", "full" if full else "selective")
        settings.carry("recompute-num-layers", "trainer.memory.checkpoint_every_layers", whole)
        target = "trainer.memory.activation_checkpointing"
        settings.settle(Outcome.CARRIED, "", "recompute-granularity", target=target)
    for flag in _PARALLEL:
        single = settings.get(flag, default=1) == 1
        note = "it is 1" if single else "hpcrl shards by FSDP2, with expert and context parallelism (docs/training.md)"
        settings.settle(Outcome.NOT_NEEDED if single else Outcome.LOST, note, flag)
    for name, flag in (("rank", "lora-rank"), ("alpha", "lora-alpha")):
        settings.carry(flag, f"trainer.lora.{name}")
    settings.settle(Outcome.LOST, "say trainer.optimizer.warmup_steps and schedule", "lr-warmup-fraction", "min-lr")
    note = "hpcrl has trainer.parallelism.dispatcher: all_to_all or deepep"
    settings.settle(Outcome.LOST, note, "moe-token-dispatcher-type", "moe-enable-deepep")
    settings.settle(Outcome.NOT_NEEDED, "there are no pipeline stages", "decoder-*-pipeline-num-layers")
    settings.carry("deterministic-mode", "trainer.deterministic", bool)
    note = "hpcrl divides by the tokens of the batch (docs/algorithms.md)"
    settings.settle(Outcome.NOT_NEEDED, note, "calculate-per-token-loss")
    note = "hpcrl decides it, or has it always"
    flags = (
        "update-weight-buffer-size",
        "data-pad-size-multiplier",
        "log-probs-chunk-size",
        "no-*",
        "use-distributed-*",
    )
    settings.settle(Outcome.NOT_NEEDED, note, *flags)
    flags = ("recompute-*", "overlap-*", "use-precision-aware-optimizer", "use-dynamic-batch-size", "sequence-parallel")
    settings.settle(
        Outcome.NOT_NEEDED,
        note,
        *flags,
        "accumulate-*",
        "attention-*",
        "hidden-dropout",
        "balance-data",
        "micro-batch-size",
    )


def _engines(settings: Settings) -> None:
    per_engine, gpus = settings.integer("rollout-num-gpus-per-engine"), settings.integer("rollout-num-gpus")
    if per_engine:
        settings.put("engine.tp", per_engine)
        note = "tensor parallelism over the GPUs of an engine; wide expert parallelism is engine.tp 1 with engine.nodes"
        settings.settle(Outcome.CHANGED, note, "rollout-num-gpus-per-engine", target="engine.tp")
    if gpus and per_engine:
        settings.put("engine.replicas", max(1, gpus // per_engine))
        settings.settle(Outcome.CHANGED, "by the GPUs of an engine", "rollout-num-gpus", target="engine.replicas")
    target, note = (
        "engine.memory.gpu_memory_utilization",
        "SGLang's share is for weights and KV, vLLM's for all that an engine uses",
    )
    settings.carry("sglang-mem-fraction-static", target, positive, note=note)
    settings.carry("sglang-context-length", "engine.max_model_len", whole)
    settings.settle(Outcome.LOST, "hpcrl's engines are vLLM: engine.vllm_args", "sglang-*")


def _data(settings: Settings) -> None:
    path = settings.get("prompt-data")
    if isinstance(path, str):
        kind = _CHECKERS.get(str(settings.get("rm-type")))
        environment: dict[str, Any] = {"name": "questions", "kind": "dataset", "path": path}
        chat = settings.has("apply-chat-template")
        environment["columns"] = {
            "messages" if chat else "prompt": settings.get("input-key", default="input"),
            "answer": settings.get("label-key", default="label"),
        }
        environment["rewards"] = [{"kind": kind or "math"}]
        settings.put("environments", [environment])
        note = "a list of messages in the column of prompts; for texts, say columns.prompt" if chat else ""
        keys = ("prompt-data", "input-key", "label-key", "apply-chat-template", "rollout-shuffle")
        settings.settle(Outcome.CHANGED if note else Outcome.CARRIED, note, *keys, target="environments")
        note = "" if kind else "the checker is yours to choose (docs/environments.md)"
        settings.settle(Outcome.CHANGED, note or "math-verify judges", "rm-type", target="environments")
    note = "name your questions as an environment (docs/environments.md)"
    settings.settle(Outcome.LOST, note, "input-key", "label-key", "apply-chat-template", "rollout-shuffle")
    note = "a set of its own needs an environment with weight 0 and evaluation.sets"
    settings.settle(Outcome.LOST, note, "eval-prompt-data", "n-samples-per-eval-prompt", "eval-config")
    note = "an environment of yours: kind: custom (docs/environments.md)"
    settings.settle(
        Outcome.LOST, note, "custom-*", "rollout-function-path", "rm-*", "reward-key", "metadata-key", "tool-key"
    )
    settings.settle(Outcome.LOST, "sinks: [{name: tensorboard, sink: tensorboard}]", "use-tensorboard")
    settings.settle(Outcome.LOST, "engine.prefill and engine.decode", "prefill-num-servers")
    if settings.has("use-wandb"):
        project = settings.get("wandb-project")
        settings.put(
            "sinks", [{"name": "wandb", "sink": "wandb"} | ({"parameters": {"project": project}} if project else {})]
        )
        settings.settle(Outcome.CARRIED, "", "use-wandb", "wandb-project", target="sinks")
    note = "the first and the last version are always evaluated; supervised training is hpcrl sft"
    settings.settle(
        Outcome.LOST, note, "loss-type", "loss-mask-type", "disable-compute-advantages-and-returns", "debug-*"
    )
    settings.settle(Outcome.LOST, "hpcrl counts optimizer steps: trainer.steps", "num-epoch")
    settings.settle(Outcome.LOST, "hpcrl does not train multi-token prediction", "enable-mtp-training", "mtp-*")
    settings.settle(Outcome.NOT_NEEDED, "secrets are files or variables, and runs have names", "wandb-*")
