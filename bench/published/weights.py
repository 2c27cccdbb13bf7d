"""Weight updates that others published, by the transport that a plan uses.

A plan's versions go through the shared filesystem, and from node to node (`hpcrl.planning.times.handoff`). Where the
published engine has its weights in the hosts of its nodes and passes them on, that is the second half of a plan's
``fan_out``: from node to node over the adapters, and into the GPUs. Resharding and broadcasts between GPUs of trainer
and engines are no transport of a plan: those cases are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcrl.models import load_facts
from hpcrl.planning.times.forecast import engine_bytes, engine_tensors
from hpcrl.planning.times.shapes import EngineShape
from published.cases import Case, cannot, rates

__all__ = ["weight_updates"]

CHECKPOINT_ENGINE = "checkpoint-engine README, benchmark"
#: model, FP8, GPU, GPUs of the update, tensor parallelism, seconds by broadcast and from peer to peer
UPDATES = (
    ("GLM-4.5-Air", False, "H800", 8, 8, 3.47, 4.12),
    ("Qwen3-235B-A22B", False, "H800", 8, 8, 6.22, 7.10),
    ("DeepSeek-V3", True, "H20", 16, 16, 10.19, 11.80),
    ("Kimi-K2-Instruct", True, "H20", 16, 16, 14.36, 17.49),
    ("DeepSeek-V3", True, "H20", 256, 16, 11.33, 11.81),
    ("Kimi-K2-Instruct", True, "H20", 256, 16, 16.04, 16.75),
)
REFUSED = (
    ("NCCL reshard Qwen3-30B-A3B BF16, 32 H100", 0.87, "NeMo-RL docs/design-docs/nccl-reshard-refit.md"),
    ("NCCL reshard DeepSeek-V3 BF16, 512 H100", 2.61, "NeMo-RL docs/design-docs/nccl-reshard-refit.md"),
    ("NCCL broadcast DeepSeek-V3, 36 nodes H100", 14.21, "NeMo-RL#3186"),
    ("NIXL DeepSeek-V3, 36 nodes H100", 9.25, "NeMo-RL#3186"),
    ("broadcast Qwen3-30B-A3B BF16, 32 H100", 7.0, "verl checkpoint_engine/README.md"),
    ("sync Qwen3-235B-A22B, after tuning", 23.7, "verl docs, async training"),
)


def weight_updates() -> Iterator[Case]:
    """All cases."""
    for model, fp8, gpu, gpus, tp, everyone, peers in UPDATES:
        what = f"{model} {'FP8' if fp8 else 'BF16'}, {gpus} {gpu}"
        yield from fan_out(model, gpu, tp, {"all at once": everyone, "from peers": peers}, fp8=fp8, what=what)
    for what, seconds, source in REFUSED:
        yield Case("weights", what, "s", seconds, None, source, cannot=cannot("handoff", "transport"))


def fan_out(model: str, gpu: str, tp: int, published: dict[str, float], *, fp8: bool, what: str) -> Iterator[Case]:
    """From hosts that have the weights to the GPUs of an engine: the terms of a plan's hand-off after the share.

    Where a node has all of them already (one node in all), nothing goes over adapters.
    """
    own, nodes = rates(gpu), max(1, tp // 8)
    shape = EngineShape(
        replicas=1,
        nodes=nodes,
        gpus_per_node=tp // nodes,
        tensor_parallel=tp,
        weight_dtype="fp8" if fp8 else "bfloat16",
    )
    facts = load_facts(model)
    node, gpu_bytes = engine_bytes(facts, shape)
    seconds = gpu_bytes / own.pcie + engine_tensors(facts, shape) * own.calibration.constant("tensor_load_s")
    if nodes > 1:
        seconds += node / own.node_network
    reason = (
        "every GPU gets all buckets and cuts its part out, and each bucket waits for the one before; a plan's engine "
        "reads its own part alone"
    )
    for way, measured in published.items():
        fitted = model == "Qwen3-235B-A22B" and way == "all at once"
        yield Case(
            "weights", f"hand-off {what}, {way}", "s", measured, seconds, CHECKPOINT_ENGINE, reason, fitted=fitted
        )
