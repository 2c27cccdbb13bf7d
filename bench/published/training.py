"""Training throughput that others published."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpcrl.models import load_facts
from hpcrl.planning.times.lengths import Quantiles
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from published.cases import Case, cannot, rates

__all__ = ["training"]


class Row(NamedTuple):
    """A row of Automodel's table: sequences of 4,096 tokens, BF16, mock data, a router that balances exactly.

    Attributes
    ----------
    micro:
        Sequences of a micro-batch.
    stages:
        Of the pipeline.
    """

    model: str
    gpus: int
    batch: int
    micro: int
    stages: int
    experts: int
    published: float


AUTOMODEL = (
    Row("DeepSeek-V3", 256, 512, 1, 4, 64, 1002),
    Row("DeepSeek-V3", 1024, 8192, 1, 4, 64, 865),
    Row("Kimi-K2-Instruct", 256, 512, 1, 8, 32, 924),
    Row("Qwen3-30B-A3B", 8, 512, 4, 1, 8, 12040),
    Row("gpt-oss-20b", 8, 256, 2, 1, 1, 13058),
    Row("gpt-oss-120b", 64, 512, 2, 1, 1, 7626),
    Row("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8, 512, 4, 1, 8, 16789),
    Row("NVIDIA-Nemotron-3-Super-120B-A12B-BF16", 64, 512, 2, 1, 64, 4497),
)
LENGTH = 4096


def training() -> Iterator[Case]:
    """All cases."""
    yield megatron()
    for row in AUTOMODEL:
        yield automodel(row)
    yield stitch()


def megatron() -> Case:
    """Kernels of DeepSeek-V3's training step alone, against what a GPU reached: what `trainer_busy` is made of."""
    facts, own = load_facts("DeepSeek-V3"), rates("H100")
    shape = TrainerShape(
        nodes=128, gpus_per_node=8, expert_parallel=64, compute_dtype="fp8", recompute="none", micro_batch_tokens=LENGTH
    )
    terms = trainer_step(facts, shape, TrainerBatch(8192, Quantiles((4096.0,))), own)
    seconds = sum(term.seconds or 0.0 for term in terms if term.name.startswith("compute."))
    return Case(
        "training",
        "DeepSeek-V3 training, 1,024 H100, FP8",
        "tokens/s a GPU",
        1412.0,
        8192 * LENGTH / 1024 / seconds,
        "Megatron-Core, arXiv 2603.07685, tables 11 and 17",
        fitted=True,
    )


def automodel(row: Row) -> Case:
    """A plan of FSDP and expert parallelism on the same GPUs; stages of a pipeline are no part of one."""
    shape = TrainerShape(
        nodes=row.gpus // 8,
        gpus_per_node=8,
        expert_parallel=row.experts,
        recompute="none",
        micro_batch_tokens=row.micro * LENGTH,
    )
    step = trainer_step(
        load_facts(row.model), shape, TrainerBatch(row.batch, Quantiles((float(LENGTH),))), rates("H100")
    )
    missing = cannot("trainer", "pp") if row.stages > 1 else ()
    return Case(
        "training",
        f"{row.model} training, {row.gpus} H100, BF16",
        "tokens/s a GPU",
        row.published,
        row.batch * LENGTH / row.gpus / step.known_seconds,
        "NeMo Automodel docs/performance-summary.mdx, pre-training, DGX-H100",
        _reason(row),
        cannot=missing,
    )


def _reason(row: Row) -> str:
    if row.experts == 1:
        return (
            "its expert parallelism is not published (DeepEP is named, no degree), so experts are gathered for each "
            "micro-batch here"
        )
    return (
        "trainer_busy comes from a run that had dispatch, bubbles and MTP within it, and the plan's dispatch (torch's, "
        "a copy for each expert) is added once more; stages of a pipeline keep their layers, a plan gathers them"
    )


def stitch() -> Case:
    """The batch of this run is not published, so only the ratio of its two passes can be predicted."""
    facts, own = load_facts("GLM-5.2"), rates("H200")
    batch = TrainerBatch(128, Quantiles((40000.0,)))
    shape = TrainerShape(
        nodes=16, gpus_per_node=8, context_parallel=8, expert_parallel=32, recompute="full", micro_batch_tokens=65536
    )
    steps = trainer_step(facts, shape, batch, own)
    whole = sum(term.seconds or 0.0 for term in steps if term.name.startswith(("compute.", "ep.", "cp.")))
    none = TrainerShape(
        nodes=16, gpus_per_node=8, context_parallel=8, expert_parallel=32, recompute="none", micro_batch_tokens=65536
    )
    forward = 0.0
    for term in trainer_step(facts, none, batch, own):
        if term.name.startswith("compute."):
            forward += (term.seconds or 0.0) / (1.0 + float(term.inputs["backward"]))
        elif term.name.startswith(("ep.", "cp.")):
            forward += (term.seconds or 0.0) / 2.0
    return Case(
        "training",
        "GLM-5.2 step on 128 GPUs: train over log-probabilities",
        "ratio",
        623.1 / 219.5,
        whole / forward,
        "modal-projects/stitch#129 (1,020.5 s: 219.5 log-probabilities, 623.1 training)",
        "tokens of the batch are not published, so no seconds can be predicted; the bubble of its pipeline weighs more "
        "on the shorter pass, and the log-probability pass has micro-batches of its own",
        cannot=cannot("trainer", "pp"),
    )
