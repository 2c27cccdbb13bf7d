"""Training throughput that others published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from hpcrl.models import load_facts
from hpcrl.models.facts import ModelFacts
from hpcrl.models.layers import Mla
from hpcrl.models.tensors import Part
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.trainer import TrainerBatch, trainer_step
from planning.case_files import rows_of
from planning.published.cases import PUBLISHED, Case, cannot, rates


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of Automodel's table: sequences of 4,096 tokens, BF16, mock data.

    Their recipes (examples/benchmark/configs) say what the table does not: DeepEP, experts over ``experts`` ranks, and
    whether layers are computed again. Their balanced gate gives a token neighbouring experts, which are on one node, so
    that a dispatch sends one row.

    Attributes
    ----------
    micro:
        Sequences of a micro-batch.
    stages, chunks:
        Of the pipeline, and parts of the model that a stage has.
    flight:
        Micro-batches that go through the pipeline together.
    """

    model: str
    gpus: int
    batch: int
    micro: int
    experts: int
    published: float
    stages: int = 1
    chunks: int = 1
    flight: int = 1
    recompute: bool = True


AUTOMODEL = PUBLISHED["automodel"]
LENGTH = 4096


def training() -> Iterator[Case]:
    """All cases."""
    yield megatron()
    for row in rows_of(AUTOMODEL["rows"], Row):
        yield automodel(row)
    yield stitch()


def megatron() -> Case:
    """DeepSeek-V3 on 1,024 GPUs, the run that `trainer_busy` comes from.

    Two ranks of tensor parallelism, 8 stages of 4 chunks, experts over 64 ranks, up-projections of latents and dense
    layers computed again, one module of multi-token prediction (a layer and the head once more), and dispatch that runs
    beside the products of another micro-batch (Megatron-MoE-ModelZoo, best_practice/DeepSeekV3/run.sh).
    """
    facts, own = load_facts("DeepSeek-V3"), rates("H100")
    shape = TrainerShape(
        nodes=128,
        gpus_per_node=8,
        expert_parallel=64,
        compute_dtype="fp8",
        recompute="none",
        micro_batch_tokens=LENGTH,
        # its router takes experts from 4 of 8 groups, and a group is a node
        rows_sent=4.0,
        balanced_experts=True,
    )
    table = trainer_step(facts, shape, TrainerBatch(8192, Quantiles((float(LENGTH),))), own)
    seconds = {term.name: term.value or 0.0 for term in table}
    dense = facts.parameters_by_part()
    head, linear = dense[Part.LM_HEAD], sum(dense[part] for part in dense if part not in (Part.EXPERT, Part.EMBEDDING))
    again = linear_again(facts) / (3 * linear)
    module = 1 / len(facts.layers)
    work = seconds["compute.linear"] * (1 + again + module + head / linear)
    work += sum(seconds[name] for name in ("compute.experts", "compute.attention", "compute.memory")) * (1 + module)
    dispatch = seconds["ep.all_to_all"] * (1 + module) * (1 - hidden_dispatch())
    return Case(
        "training",
        "DeepSeek-V3 training, 1,024 H100, FP8",
        "tokens/s a GPU",
        1412.0,
        8192 * LENGTH / 1024 / ((work + dispatch) * bubble(stages=8, chunks=4, flight=128)),
        "Megatron-Core, arXiv 2603.07685, tables 11 and 17",
        fitted=True,
    )


def linear_again(facts: ModelFacts) -> float:
    """Parameters of the products that this run computes again: up-projections of latents, and dense layers."""
    mixer = facts.layers[0].mixer
    assert isinstance(mixer, Mla)
    heads, latent = mixer.num_attention_heads, mixer.qk_nope_head_dim
    up = (mixer.q_lora_rank or 0) * heads * (latent + mixer.qk_rope_head_dim)
    up += mixer.kv_lora_rank * heads * (latent + mixer.v_head_dim)
    return float(up * len(facts.layers) + facts.parameters_by_part()[Part.DENSE_MLP])


def hidden_dispatch() -> float:
    """Share of a dispatch that goes beside products of another micro-batch, from the same run with and without.

    Qwen3-235B-A22B on 256 H100, experts over 32 ranks with DeepEP: 19.7 and 17.6 s a step of 2,048 sequences
    (Megatron-MoE-ModelZoo, best_practice/Qwen3). A token's 8 experts are on 3.6 of 4 nodes, as drawn at random.
    """
    facts, nodes = load_facts("Qwen3-235B-A22B"), 4
    shape = TrainerShape(
        nodes=32,
        gpus_per_node=8,
        expert_parallel=32,
        recompute="none",
        micro_batch_tokens=LENGTH,
        rows_sent=rows_to(nodes, facts),
        balanced_experts=True,
    )
    table = trainer_step(facts, shape, TrainerBatch(2048, Quantiles((float(LENGTH),))), rates("H100"))
    return (19.7 - 17.6) / (table["ep.all_to_all"].value or 0.0)


def rows_to(nodes: int, facts: ModelFacts) -> float:
    """Nodes of ``nodes`` that have some of a token's experts, which are drawn at random: DeepEP sends a row to each."""
    return nodes * (1 - (1 - 1 / nodes) ** facts.num_experts_per_tok)


def bubble(*, stages: int, chunks: int, flight: int) -> float:
    """How much longer a pipeline takes: every stage waits for ``stages - 1`` chunks of the ``chunks · flight``."""
    return 1 + (stages - 1) / (chunks * flight)


def automodel(row: Row) -> Case:
    """A plan of FSDP and expert parallelism on the same GPUs.

    Stages of a pipeline are no part of one: beside them stands a plan without gathers (a stage keeps its layers), times
    the bubble.
    """
    shape = TrainerShape(
        nodes=row.gpus // 8,
        gpus_per_node=8,
        expert_parallel=row.experts,
        recompute="full" if row.recompute else "none",
        micro_batch_tokens=row.micro * LENGTH,
        rows_sent=1.0,
        balanced_experts=True,
    )
    step = trainer_step(
        load_facts(row.model), shape, TrainerBatch(row.batch, Quantiles((float(LENGTH),))), rates("H100")
    )
    seconds = step.known_seconds
    if row.stages > 1:
        seconds -= step["fsdp.exposed"].value or 0.0
        seconds *= bubble(stages=row.stages, chunks=row.chunks, flight=row.flight)
    missing = cannot("trainer", "pp") if row.stages > 1 else ()
    return Case(
        "training",
        f"{row.model} training, {row.gpus} H100, BF16",
        "tokens/s a GPU",
        row.published,
        row.batch * LENGTH / row.gpus / seconds,
        AUTOMODEL["source"],
        "trainer_busy is one number, from a run in FP8 of a model with wide layers",
        cannot=missing,
    )


def stitch() -> Case:
    """The batch of this run is not published, so only the ratio of its two passes can be predicted."""
    facts, own = load_facts("GLM-5.2"), rates("H200")
    batch = TrainerBatch(128, Quantiles((40000.0,)))
    shape = TrainerShape(
        nodes=16,
        gpus_per_node=8,
        context_parallel=8,
        expert_parallel=32,
        recompute="full",
        micro_batch_tokens=65536,
        sparse_kernels="libraries",
    )
    steps = trainer_step(facts, shape, batch, own)
    whole = sum(term.value or 0.0 for term in steps if term.name.startswith(("compute.", "ep.", "cp.")))
    forward = 0.0
    for term in trainer_step(facts, replace(shape, recompute="none"), batch, own):
        if term.name.startswith("compute."):
            forward += (term.value or 0.0) / (1.0 + float(term.inputs["backward"]))
        elif term.name.startswith(("ep.", "cp.")):
            forward += (term.value or 0.0) / 2.0
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
