"""Flags of vLLM that the plan writes itself, and why a recipe cannot."""

from __future__ import annotations

_CONTRACT = "the orchestrator relies on it"
_ADDRESS = "addresses and ports come from the plan"
_PLACE = "the plan derives it from nodes and GPUs"
_LATER = "this version does not manage what it needs"

OWNED_FLAGS: dict[str, str] = {
    "model": "it is model.path",
    "model-tag": "it is model.path",
    "tokenizer": "token ids go in and out; the trainer reads the tokenizer of model.path",
    "skip-tokenizer-init": _CONTRACT,
    "served-model-name": "the recipe's name sets it",
    "config": "hpcrl cannot check a file of flags; give its flags one by one",
    **dict.fromkeys(("host", "port", "uds", "root-path", "grpc", "grpc-port"), _ADDRESS),
    **dict.fromkeys(("api-key", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs"), "the orchestrator speaks plain HTTP"),
    **dict.fromkeys(("headless", "api-server-count"), _PLACE),
    **dict.fromkeys(("enable-scale-out", "tokens-only", "enable-prompt-tokens-details"), _CONTRACT),
    "generation-config": "each request says how to sample; defaults of the model directory must not come in",
    "override-generation-config": "each request says how to sample",
    "logprobs-mode": "it must be the distribution that the trainer computes",
    "max-logprobs": _CONTRACT,
    "logits-processors": "log-probabilities would not be those that the trainer computes",
    "weight-transfer-config": "weights come from hand-offs",
    "worker-extension-cls": "the orchestrator relies on it to know when a hand-off was read",
    "weight-version": "it comes from hand-offs",
    "additional-config": "it sets the path and the identity with which weights are read",
    "middleware": "it accepts only requests with the run's token",
    "worker-cls": "weight updates rely on vLLM's own worker",
    "enable-prefix-caching": "turns of a rollout and rollouts of a group rely on it",
    "max-model-len": "it is engine.max_model_len",
    "max-num-seqs": "it is max_num_seqs of engine, or of engine.prefill and engine.decode",
    "max-num-batched-tokens": "it is max_num_batched_tokens of engine, or of engine.prefill and engine.decode",
    "block-size": "it is engine.block_size",
    "dtype": "it is engine.dtype",
    "seed": "it is the recipe's seed",
    "kv-cache-memory-bytes": "it is engine.kv_cache_gib on CPUs, or what engine.memory.gpu_memory_utilization leaves",
    "kv-events-config": "it follows from engine.router.kind",
    "kv-transfer-config": "it follows from engine.kv_store, prefill and decode",
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port"), _PLACE),
    **dict.fromkeys(
        (
            "data-parallel-size",
            "data-parallel-rank",
            "data-parallel-start-rank",
            "data-parallel-size-local",
            "data-parallel-address",
            "data-parallel-rpc-port",
            "data-parallel-backend",
            "data-parallel-hybrid-lb",
            "data-parallel-external-lb",
            "data-parallel-multi-port-external-lb",
            "data-parallel-supervisor-port",
            "enable-expert-parallel",
            "all2all-backend",
            "tensor-parallel-size",
            "device-ids",
        ),
        _PLACE,
    ),
    "pipeline-parallel-size": "hpcrl has no pipeline parallelism",
    "enable-return-routed-experts": "it is engine.return_routed_experts",
    **dict.fromkeys(("enable-lora", "lora-modules"), "engines merge adapters into their weights"),
    **dict.fromkeys(("speculative-config", "spec-method", "spec-model", "spec-tokens"), _LATER),
    "disable-log-stats": "metrics of the run are read from it",
}
"""By long name without dashes."""


def owner_of(flag: str) -> str | None:
    """Return the reason why the plan writes ``flag`` itself; None where a recipe may.

    Parameters
    ----------
    flag:
        Long name without leading dashes, also as ``no-NAME`` or ``NAME.key``.
    """
    name = flag.partition(".")[0]
    return OWNED_FLAGS.get(name) or OWNED_FLAGS.get(name.removeprefix("no-"))
