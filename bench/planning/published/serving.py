"""Latency and throughput of engines that others published."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hpcrl.models import load_facts
from hpcrl.planning.times.engine import decode_step, prefill_token
from hpcrl.planning.times.shapes import ComputeDtype, EngineShape
from planning.case_files import rows_of
from planning.published.cases import PUBLISHED, Case, rates


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds between tokens with ``batch`` sequences at once on one node or more."""

    what: str
    model: str
    gpu: str
    gpus: int
    batch: int
    context: float
    published: float
    dtype: ComputeDtype = "fp8"
    experts: int = 1


class Speed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens a second by the length of the prompt in tokens; the calibration comes from those that are ``fitted``."""

    model: str
    gpus: int
    dtype: ComputeDtype
    published: dict[int, float]
    fitted: list[int] = []


QWEN = PUBLISHED["qwen"]


LAYER = (
    "small kernels of a layer are one constant for every GPU, engine and width; long prompts use prefill_busy, which "
    "comes from a wide engine on H100"
)


def serving() -> Iterator[Case]:
    """All cases."""
    for table in PUBLISHED["decode"]:
        for row in rows_of(table["rows"], Decode):
            yield decode(row, table["source"])
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
    for row in rows_of(QWEN["rows"], Speed):
        facts, shape = load_facts(row.model), engine(row.gpus, row.dtype)
        for prompt, speed in row.published.items():
            first = prompt * prefill_token(facts, shape, own, context=prompt / 2).known_seconds / row.gpus
            each = decode_step(facts, shape, own, batch=1, context=prompt + out / 2).known_seconds
            what = f"{row.model}, {row.gpus} H20, {row.dtype}, prompt of {prompt:,}"
            predicted = (prompt + out) / (first + out * each)
            fitted = prompt in row.fitted
            yield Case("serving", what, "tokens/s", speed, predicted, QWEN["source"], LAYER, fitted=fitted)


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
