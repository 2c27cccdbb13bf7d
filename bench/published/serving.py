"""Latency and throughput of engines that others published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpcrl.models import load_facts
from hpcrl.planning.times.engine import decode_step, prefill_token
from hpcrl.planning.times.shapes import ComputeDtype, EngineShape
from published.cases import Case, rates

__all__ = ["serving"]


class Decode(NamedTuple):
    """Milliseconds between tokens with ``batch`` sequences at once on one node or more."""

    what: str
    model: str
    gpu: str
    gpus: int
    dtype: ComputeDtype
    batch: int
    context: float
    published: float
    experts: int = 1


INFERENCEX = "SemiAnalysis InferenceX#870: SGLang 0.5.7, TP 8, EP 1, 1,024 in and 1,024 out, mean time per output token"
MINIMAX = "SemiAnalysis InferenceX#832: vLLM 0.16, 4 at once, 1,024 in and 1,024 out (MiniMax-M2.5 has the sizes of M2)"
R1 = "tt-inference-server#356: SGLang over InfiniBand, TP 16, one at a time, 128 in and 1,024 out"
DECODE = {
    INFERENCEX: tuple(
        Decode("DeepSeek-R1, 8 H200, TP 8", "DeepSeek-V3", "H200", 8, "fp8", batch, 1536, ms)
        for batch, ms in ((8, 12.8), (16, 17.2), (32, 25.6), (64, 34.6))
    ),
    MINIMAX: (
        Decode("MiniMax-M2.5, 8 H100, TP 8, EP 8", "MiniMax-M2", "H100", 8, "fp8", 4, 1536, 8.96, experts=8),
        Decode("MiniMax-M2.5, 4 H100, TP 4, EP 4", "MiniMax-M2", "H100", 4, "fp8", 4, 1536, 13.34, experts=4),
    ),
    R1: (Decode("DeepSeek-R1, 16 H100, TP 16", "DeepSeek-V3", "H100", 16, "fp8", 1, 640, 23.2),),
}
QWEN = "Qwen3 docs, speed benchmark: SGLang 0.4.6 on H20, one at a time, 2,048 tokens out"
#: model, GPUs, dtype, and tokens a second (prompt and answer over the time of both) by length of the prompt
QWEN_SPEED: tuple[tuple[str, int, ComputeDtype, dict[int, float]], ...] = (
    ("Qwen3-30B-A3B", 1, "bfloat16", {1: 137.18, 14336: 849.62, 63488: 1538.79}),
    ("Qwen3-30B-A3B", 1, "fp8", {1: 155.55, 14336: 945.13, 63488: 1647.89}),
    ("Qwen3-32B", 1, "fp8", {1: 46.17, 14336: 287.60, 63488: 532.18}),
    ("Qwen3-235B-A22B", 8, "bfloat16", {1: 74.50, 14336: 546.73, 63488: 1493.91}),
    ("Qwen3-235B-A22B", 4, "fp8", {1: 71.65, 14336: 514.23, 63488: 1269.34}),
)
LAYER = (
    "small kernels of a layer are one constant for every GPU, engine and width; long prompts use prefill_busy, which "
    "comes from a wide engine on H100"
)


def serving() -> Iterator[Case]:
    """All cases."""
    for source, rows in DECODE.items():
        for row in rows:
            yield decode(row, source)
    yield from qwen()
    yield from wide()


def decode(row: Decode, source: str) -> Case:
    """One decode step."""
    step = decode_step(
        load_facts(row.model),
        engine(row.gpus, row.dtype, row.experts),
        rates(row.gpu),
        batch=row.batch,
        context=row.context,
    )
    what = f"{row.what}, {row.dtype}, {row.batch} at once"
    return Case("serving", what, "ms a token", row.published, 1e3 * step.known_seconds, source, LAYER)


def engine(gpus: int, dtype: ComputeDtype, experts: int = 1) -> EngineShape:
    """One replica with tensor parallelism over all of its GPUs."""
    per_node = min(8, gpus)
    return EngineShape(
        replicas=1,
        nodes=gpus // per_node,
        gpus_per_node=per_node,
        tensor_parallel=gpus,
        expert_parallel=experts,
        weight_dtype=dtype,
    )


def qwen() -> Iterator[Case]:
    """The prompt and 2,048 tokens after it, alone on the engine."""
    out, own = 2048, rates("H20")
    for model, gpus, dtype, published in QWEN_SPEED:
        facts, shape = load_facts(model), engine(gpus, dtype)
        for prompt, speed in published.items():
            first = prompt * prefill_token(facts, shape, own, context=prompt / 2).known_seconds / gpus
            each = decode_step(facts, shape, own, batch=1, context=prompt + out / 2).known_seconds
            what = f"{model}, {gpus} H20, {dtype}, prompt of {prompt:,}"
            fitted = (model, dtype, prompt) == ("Qwen3-30B-A3B", "bfloat16", 1)
            predicted = (prompt + out) / (first + out * each)
            yield Case("serving", what, "tokens/s", speed, predicted, QWEN, LAYER, fitted=fitted)


def wide() -> Iterator[Case]:
    """Engines with experts over many nodes."""
    facts = load_facts("DeepSeek-V3")
    whole = EngineShape(replicas=1, nodes=18, gpus_per_node=8, expert_parallel=144, weight_dtype="fp8")
    no_overlap = "both overlap two batches in decode; the formula has none, which is what vLLM does by default"
    step = decode_step(facts, whole, rates("H800"), batch=14800 / 8 / 21, context=4989).known_seconds
    source = "DeepSeek open-infra-index, day 6: 14.8k tokens/s a node of H800 at 20 to 22 tokens/s a user"
    yield Case("serving", "DeepSeek-V3 decode, EP 144", "ms a step", 1000 / 21, 1e3 * step, source, no_overlap)
    nine = EngineShape(replicas=1, nodes=9, gpus_per_node=8, expert_parallel=72, weight_dtype="fp8")
    step = decode_step(facts, nine, rates("H100"), batch=256, context=2050).known_seconds
    source = "SGLang, LMSYS 2025-05-05: 22.3k tokens/s a node of H100, 256 sequences a GPU, 2,000 tokens"
    published = 8 * 256 / 22300 * 1e3
    yield Case("serving", "DeepSeek-V3 decode, EP 72", "ms a step", published, 1e3 * step, source, no_overlap)
    four = EngineShape(replicas=1, nodes=4, gpus_per_node=8, expert_parallel=32, weight_dtype="fp8")
    token = prefill_token(facts, four, rates("H100"), context=1000).known_seconds
    source = "SGLang, LMSYS 2025-05-05: 52.3k tokens/s a node of H100 for prompts of 2,000"
    what = "DeepSeek-V3 prompts, EP 32"
    yield Case("serving", f"{what}, H100", "tokens/s a node", 52300, 8 / token, source, fitted=True)
    token = prefill_token(facts, four, rates("H800"), context=2500).known_seconds
    source = "DeepSeek open-infra-index, day 6: 73.7k tokens/s a node of H800, 56.3 % of them from the cache"
    reason = "the mean of a day's service, not a full load"
    yield Case("serving", f"{what}, H800", "tokens/s a node", 73700 * 0.437, 8 / token, source, reason)
