"""Training throughput of pipelines whose stages are not equal, as verified runs of Megatron Bridge published it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hpcrl.models import load_facts
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from planning.case_files import rows_of
from planning.published.cases import PUBLISHED, Case, cannot, rates
from planning.published.training import rows_to


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card of a verified run: BF16, a micro-batch of one packed sequence, one module of multi-token prediction.

    Attributes
    ----------
    length:
        Tokens of a sequence, all of the same length.
    stages, chunks, longest:
        Of the pipeline, parts of the model that a stage has, and layers of the longest stage (0: all are equal).
    experts:
        Ranks that one copy of the experts is spread over.
    groups:
        Nodes that a router takes a token's experts from at most; 0: any.
    again:
        Layers are computed again.
    """

    model: str
    gpus: int
    batch: int
    length: int
    stages: int
    experts: int
    published: float
    chunks: int = 1
    longest: int = 0
    cp: int = 1
    groups: int = 0
    again: bool = True
    balanced: bool = False
    reason: str = ""


def stages() -> Iterator[Case]:
    """All cases."""
    for run in rows_of(PUBLISHED["bridge"]["rows"], Run):
        yield staged(run)


def staged(run: Run) -> Case:
    """A plan without gathers (a stage keeps its layers) on the same GPUs, times what the pipeline adds."""
    facts = load_facts(run.model)
    shape = TrainerShape(
        nodes=run.gpus // 8,
        gpus_per_node=8,
        context_parallel=run.cp,
        expert_parallel=run.experts,
        recompute="full" if run.again else "none",
        micro_batch_tokens=run.length,
        rows_sent=float(run.groups) or rows_to(run.experts // 8, facts),
        sparse_kernels="libraries",
        balanced_experts=run.balanced,
    )
    # a sequence for each group of ranks: the pipeline divides layers, where a plan would divide sequences unevenly
    batch = TrainerBatch(shape.groups, Quantiles((float(run.length),)))
    step, layers = trainer_step(facts, shape, batch, rates("H100")), len(facts.layers)
    # a module of multi-token prediction is one layer more
    seconds = (step.known_seconds - (step["fsdp.exposed"].value or 0.0)) * (1 + 1 / layers)
    seconds *= run.batch / shape.groups
    copies = run.gpus // (run.stages * run.cp)
    if run.longest:
        seconds *= unequal(run.stages, run.batch // copies, run.longest / (layers / run.stages))
    else:
        seconds *= 1 + (run.stages - 1) / (run.chunks * run.batch / copies)
    return Case(
        "training",
        f"{run.model} training, {run.gpus} H100, BF16, {run.length:,} tokens",
        "tokens/s a GPU",
        run.published,
        run.batch * run.length / run.gpus / seconds,
        PUBLISHED["bridge"]["source"],
        run.reason,
        cannot=cannot("trainer", "pp"),
    )


def unequal(stages: int, flight: int, longest: float) -> float:
    """How much longer a pipeline takes than ``flight`` micro-batches on equal stages without a bubble.

    The first micro-batch goes through all stages, and the others follow at the pace of the longest, which is
    ``longest`` times the mean.
    """
    return (stages + (flight - 1) * longest) / flight
