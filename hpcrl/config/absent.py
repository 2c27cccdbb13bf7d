"""Settings that hpcrl deliberately lacks: each is refused by name, with its substitute.

Other trainers and engines have these settings, so recipes that come from them use their keys. The error of an unknown
key would be true but not helpful: a reader would look for another spelling.
"""

from __future__ import annotations

_PIPELINE = (
    "hpcrl has no pipeline parallelism: a trainer is sharded by FSDP over all its ranks, "
    "with parallelism.ep and parallelism.cp; an engine by tp and its experts"
)
_TENSOR = (
    "the trainer has no tensor parallelism: it is sharded by FSDP over all its ranks, with "
    "parallelism.ep and parallelism.cp"
)
_VERSIONS = (
    "weights go through the shared filesystem, or over Mooncake with handoff.transport: fabric; there is no other way"
)
_SPECULATION = "hpcrl does not support speculative decoding"
_REPLICATED = "parameters are sharded by FSDP; copies of the shards are trainer.parallelism.dp_replicate"

_FP8_MOVED = (
    "it is trainer.precision.fp8 now: `fp8: {}` there is `true` here, and its own settings say what is quantised and "
    "what multiplies; `hpcrl recipe migrate FILE` rewrites it"
)
_LORA_MOVED = (
    "adapters are trainer.lora now: `lora: {rank: 16, alpha: 32}` in the section trainer; "
    "`hpcrl recipe migrate FILE` rewrites it"
)

ABSENT: dict[str, dict[str, str]] = {
    "trainer": {
        **dict.fromkeys(("pp", "vp", "vpp", "pipeline_parallel", "pipeline_model_parallel_size", "stages"), _PIPELINE),
        **dict.fromkeys(("tp", "etp", "tensor_parallel", "tensor_model_parallel_size", "sequence_parallel"), _TENSOR),
        **dict.fromkeys(("hsdp", "zero_stage"), _REPLICATED),
        "fp8": _FP8_MOVED,
        **dict.fromkeys(("lora_rank", "lora_alpha"), _LORA_MOVED),
    },
    "engine": {
        **dict.fromkeys(("pp", "pipeline_parallel", "pipeline_parallel_size"), _PIPELINE),
        **dict.fromkeys(("speculative", "speculative_config", "draft_model", "mtp"), _SPECULATION),
    },
    "handoff": dict.fromkeys(("nccl", "nixl", "rdma", "reshard"), _VERSIONS),
    "rollouts": dict.fromkeys(
        ("colocate", "colocated"),
        "trainer and engines use the same GPUs at the same time with engine.placement: shared_gpus, and take turns on "
        "the same devices with colocated",
    ),
    "capabilities": {
        "preempt_signal": "hpcrl finds out itself whether a job is preempted; remove the line, or use "
        "`hpcrl cluster migrate FILE`"
    },
    "partitions": {
        "scratch_gb_s": "plans do not use the rate of a node's own disk; remove the line, or use "
        "`hpcrl cluster migrate FILE`"
    },
}
"""Reason why a key is absent, by section and key, at any depth below it."""


def absent(path: tuple[str | int, ...]) -> str | None:
    """Return the reason why there is deliberately not such a setting; None where the key is only unknown."""
    if not path:
        return None
    return ABSENT.get(str(path[0]), {}).get(str(path[-1]).lower().replace("-", "_"))


_LOSSES = {
    "ppo": "did you mean 'ppo_clip'?",
    "dapo": "its loss is 'ppo_clip' with a clip_high above clip_low; rollouts.zero_variance: drop leaves out groups "
    "without differences",
    "dr_grpo": "its loss is 'ppo_clip', and its advantage algorithm.advantage: mean_baseline",
    "reinforce": "it is 'tis' with algorithm.advantage: mean_baseline",
    "rloo": "it is 'tis' with algorithm.advantage: mean_baseline",
    "vanilla": "it is 'tis' with algorithm.advantage: mean_baseline",
    "kl": "there is no loss against a reference model",
}
_ADVANTAGES = {
    "dr_grpo": "it is 'mean_baseline'",
    "rloo": "'mean_baseline' is the nearest: the mean of the whole group",
    "reinforce": "'mean_baseline' is the nearest",
    "gae": "there is no critic: advantages are those of groups",
    "ppo": "there is no critic: advantages are those of groups; the loss is algorithm.loss.kind: ppo_clip",
}
_VALUES: dict[tuple[str | int, ...], dict[str, str]] = {
    ("algorithm", "loss", "kind"): _LOSSES,
    ("algorithm", "advantage"): _ADVANTAGES,
}


def called_elsewhere(path: tuple[str | int, ...], value: object) -> str:
    """Return what to write for a value that other trainers have under this key; empty where it is none of theirs."""
    word = str(value).lower().replace("-", "_").replace("drgrpo", "dr_grpo")
    return _VALUES.get(path, {}).get(word, "")
