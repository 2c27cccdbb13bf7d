"""Seconds of an optimizer step. Formulas are in docs/planning.md, and in each term."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hpcrl.models.facts import ModelFacts
from hpcrl.models.tensors import Part
from hpcrl.planning.collectives import RankGroup, all_gather, all_to_all
from hpcrl.planning.lengths import Quantiles
from hpcrl.planning.routes import token_routes_bytes
from hpcrl.planning.times.context import context_terms
from hpcrl.planning.times.newton_schulz import muon_terms
from hpcrl.planning.times.rates import Rates
from hpcrl.planning.times.shapes import TrainerShape
from hpcrl.planning.times.step_work import TOUCHED, TOUCHED_BACKWARD, StepWork, kept_bytes
from hpcrl.planning.times.terms import Seconds, TimeTable, attempt
from hpcrl.planning.times.work import pack_rows, sequence_work

_LOGIT_BYTES = 20
"""Bytes a token and entry of the vocabulary, moved once each: logits, their normaliser, probabilities, and
gradients."""


@dataclass(frozen=True, slots=True)
class TrainerBatch:
    """The batch that a trainer step trains on.

    Attributes
    ----------
    rollouts:
        Rollouts of a step.
    lengths:
        Tokens of a rollout.
    router_replay:
        The engines' choices of experts come with the rollouts.
    """

    rollouts: int
    lengths: Quantiles
    router_replay: bool = False


def trainer_step(facts: ModelFacts, shape: TrainerShape, batch: TrainerBatch, rates: Rates) -> TimeTable:
    """Return the terms of one step, without published weights and checkpoints.

    Collectives of FSDP overlap with compute as far as ``comm_overlap`` allows; only the remainder counts.
    """
    here = shape
    if shape.offload_optimizer or shape.offload_activations:
        here = replace(shape, offload_optimizer=False, offload_activations=False)
    step, terms = _on_devices(facts, here, batch, rates)
    replay = (_replay_term(step),) if batch.router_replay else ()
    return TimeTable("trainer step", (*terms, *_host_terms(replace(step, shape=shape)), *replay))


@lru_cache(maxsize=64)
def _on_devices(
    facts: ModelFacts, shape: TrainerShape, batch: TrainerBatch, rates: Rates
) -> tuple[StepWork, tuple[Seconds, ...]]:
    """Return the terms that do not depend on the place of optimizer and activations, which a search asks for often."""
    packing = pack_rows(batch.lengths, batch.rollouts, shape.groups, shape.micro_batch_tokens, facts)
    work = sequence_work(facts, batch.lengths)
    step = StepWork(facts, shape, packing, work, rates)
    return step, (*_compute_terms(step), *_fsdp_terms(step), *_mesh_terms(step), *_reference_terms(step))


def _compute_terms(step: StepWork) -> list[Seconds]:
    """Return the terms of kernels by kind; forward, backward and recomputation together."""
    shape = step.shape
    products = step.backward_products
    names = {
        "linear": "compute.linear",
        "experts": "compute.experts",
        "scores": "compute.attention",
        "indexer": "compute.indexer",
        "choice": "compute.choice",
    }
    terms = []
    for part, name in names.items():
        per_token = step.operations(part)
        if not per_token:
            continue
        passes = step.part_passes(part)
        # the indexer has no gradient
        behind = products if part in {"linear", "experts"} else step.backward_scores if part == "scores" else 0.0
        factor = passes + behind
        alone = step.sparse and part in {"scores", "indexer", "choice"}
        terms.append(
            attempt(
                name,
                lambda part=part, factor=factor: factor * step.part_s(part),  # type: ignore[misc]
                f"(passes + backward) * tokens a GPU * operations a token / rate{'' if alone else ' / trainer_busy'}",
                {
                    "passes": passes,
                    "backward": behind,
                    "tokens a GPU": step.gpu_tokens,
                    "operations a token": per_token,
                    "dtype": shape.compute_dtype,
                    "imbalance": step.packing.imbalance(shape.groups),
                    **({"kernels": shape.sparse_kernels} if alone else {"trainer_busy": step.busy}),
                },
            )
        )
    if shape.head_twice:
        operations = 2 * step.facts.vocab_size * step.facts.hidden_size
        terms.append(
            attempt(
                "compute.head_again",
                lambda: operations * step.gpu_tokens / step.rate("linear") / step.busy,
                "2 * vocabulary * hidden * tokens a GPU / rate / trainer_busy",
                {"operations a token": operations, "tokens a GPU": step.gpu_tokens},
            )
        )
    kept, logits = kept_bytes(step.facts), _LOGIT_BYTES * step.facts.vocab_size
    touched = step.passes * TOUCHED + TOUCHED_BACKWARD
    terms.append(
        attempt(
            "compute.memory",
            lambda: step.moved_s(touched) + logits * step.gpu_tokens / step.rates.memory / step.busy,
            "(touched * kept bytes a token + 20 B * vocabulary) * tokens a GPU / GPU memory / trainer_busy",
            {
                "touched": touched,
                "backward": TOUCHED_BACKWARD / TOUCHED,
                "kept bytes a token": kept,
                "tokens a GPU": step.gpu_tokens,
                "trainer_busy": step.busy,
            },
        )
    )
    return terms


@lru_cache(maxsize=64)
def _expert_split(facts: ModelFacts) -> tuple[int, int]:
    """Return the trained parameters outside of experts, and in experts."""
    parts = facts.parameters_by_part()
    experts = parts.get(Part.EXPERT, 0)
    return sum(parts.values()) - experts, experts


def _pass_gather_s(step: StepWork, bytes_each: int) -> float:
    """Return the seconds of gathering all layers (or scattering their gradients) once."""
    shape, links = step.shape, step.rates.collectives
    dense, experts = _expert_split(step.facts)
    ep = shape.expert_parallel
    everyone = RankGroup.inner(shape.shards, shape.gpus_per_node)
    outer = RankGroup.outer(shape.shards // ep, ep, shape.gpus_per_node)
    return all_gather(dense * bytes_each, everyone, links) + all_gather(experts / ep * bytes_each, outer, links)


def _add_copies_s(step: StepWork) -> float:
    """Return the seconds of adding gradient shards over copies of the parameters.

    A rank's shards take a reduce-scatter and a gather.
    """
    shape = step.shape
    if shape.copies == 1:
        return 0.0
    mine = sum(_expert_split(step.facts)) / shape.shards * shape.grad_dtype_bytes
    group = RankGroup.outer(shape.copies, shape.shards, shape.gpus_per_node)
    return 2 * all_gather(mine, group, step.rates.collectives)


def _fsdp_terms(step: StepWork) -> list[Seconds]:
    shape, packing = step.shape, step.packing
    if shape.ranks == 1:
        return []
    overlap = step.rates.calibration.share("comm_overlap")
    count = packing.micro_batches
    gathers = (1 + (1 if shape.reshard else 0)) * count

    def gather() -> float:
        return gathers * _pass_gather_s(step, shape.gather_dtype_bytes)

    def scatter() -> float:
        return step.trained_share * count * (_pass_gather_s(step, shape.grad_dtype_bytes) + _add_copies_s(step))

    def exposed() -> float:
        forward = count * _pass_gather_s(step, shape.gather_dtype_bytes) - overlap * step.forward_s()
        behind = scatter() + (gather() / 2 if shape.reshard else 0.0)
        return max(0.0, forward) + max(0.0, behind - overlap * (step.backward_s() + step.again_s()))

    dense, experts = _expert_split(step.facts)
    sizes: dict[str, float | str] = {
        "parameters outside experts": dense,
        "parameters in experts": experts,
        "expert_parallel": shape.expert_parallel,
        "ranks": shape.shards,
        "copies": shape.copies,
        "micro-batches": count,
    }
    each = "micro-batches * (all_gather(dense, all ranks) + all_gather(experts / EP, ranks / EP)) * bytes"
    return [
        attempt(
            "fsdp.gather",
            gather,
            f"{1 + shape.reshard} * {each}",
            {**sizes, "bytes": shape.gather_dtype_bytes},
            counts=False,
        ),
        attempt(
            "fsdp.reduce_scatter",
            scatter,
            f"{each}, and added up over copies",
            {**sizes, "bytes": shape.grad_dtype_bytes},
            counts=False,
        ),
        attempt(
            "fsdp.exposed",
            exposed,
            "max(0, gather - overlap * forward) + max(0, gather + reduce_scatter - overlap * backward)",
            {"overlap": overlap},
        ),
    ]


def _mesh_terms(step: StepWork) -> list[Seconds]:
    """Return the terms of expert and context parallelism."""
    shape, facts, rates = step.shape, step.facts, step.rates
    terms = []
    sparse_layers = len(facts.moe_layers)
    tokens = step.gpu_tokens / step.packing.micro_batches
    # forward, backward and recomputation each dispatch and combine
    passes = step.part_passes("exchanges") + 1
    count = step.packing.micro_batches
    if shape.expert_parallel > 1 and sparse_layers:
        rows = facts.num_experts_per_tok if shape.rows_sent is None else shape.rows_sent
        sent = tokens * rows * facts.moe_layers[0][1].expert_width * 2 * step.expert_wait
        group = RankGroup.inner(shape.expert_parallel, shape.gpus_per_node)
        hidden = rates.calibration.share("expert_comm_overlap")
        terms.append(
            attempt(
                "ep.all_to_all",
                lambda: (1 - hidden) * 2 * passes * count * sparse_layers * all_to_all(sent, group, rates.all_to_all),
                "(1 - overlap) * 2 * passes * micro-batches * sparse layers * all_to_all(tokens * rows * width * 2 B)",
                {
                    "bytes sent": sent,
                    "rows": rows,
                    "expert_imbalance": step.expert_wait,
                    "passes": passes,
                    "micro-batches": count,
                    "sparse layers": sparse_layers,
                },
            )
        )
    if shape.context_parallel > 1:
        terms += context_terms(step, tokens)
    return terms


def _reference_terms(step: StepWork) -> list[Seconds]:
    """Return the terms of the reference model: one forward pass in which nothing is kept."""
    shape, count = step.shape, step.packing.micro_batches
    if shape.reference is None:
        return []
    overlap = step.rates.calibration.share("comm_overlap")
    local = step.facts.num_parameters() / shape.shards * shape.gather_dtype_bytes

    def seconds() -> float:
        gather = count * _pass_gather_s(step, shape.gather_dtype_bytes) if shape.ranks > 1 else 0.0
        come = count * local / step.rates.pcie if shape.reference == "host" else 0.0
        return step.forward_s() + max(0.0, gather - overlap * step.forward_s()) + come

    formula = "forward + max(0, gather - overlap * forward) + micro-batches * parameters / ranks * bytes / pcie"
    sizes: dict[str, float | str] = {"copy": shape.reference, "micro-batches": count, "bytes a rank": local}
    return [attempt("reference", seconds, formula, sizes)]


def _host_terms(step: StepWork) -> list[Seconds]:
    """Return the terms of transfers to host memory and back, and of the optimizer."""
    terms = _optimizer_terms(step)
    if step.shape.offload_activations:
        layers = -(-len(step.facts.layers) // step.shape.recompute_every)
        stored = step.gpu_tokens * step.facts.hidden_size * 2 * layers
        terms.append(
            attempt(
                "offload.activations",
                lambda: max(0.0, 2 * stored / step.rates.pcie - step.forward_s() - step.backward_s()),
                "max(0, 2 * tokens * hidden * 2 B * checkpointed layers / pcie - compute)",
                {"bytes each way": stored},
            )
        )
    return terms


def _parameter_offload_terms(step: StepWork) -> list[Seconds]:
    """Return the terms of float32 shards that come for each gather, and of gradients that go, without overlap."""
    shape, rates = step.shape, step.rates
    local = step.facts.num_parameters() / shape.shards
    copies = (2 + shape.reshard) * step.packing.micro_batches
    on_node = local * shape.gpus_per_node
    return [
        attempt(
            "offload.parameters",
            lambda: copies * local * 4 / rates.pcie,
            "(gathers + gradients) * parameters / ranks * 4 B / pcie",
            {"gathers and gradients": copies, "parameters a rank": local},
        ),
        attempt(
            "optimizer.host",
            lambda: on_node * 32 / rates.host_memory,
            "parameters a node * 32 B / host memory: read master, gradient and both moments, write three of them, read "
            "gradients once more for their norm",
            {"parameters a node": on_node},
        ),
    ]


def _optimizer_terms(step: StepWork) -> list[Seconds]:
    shape, rates = step.shape, step.rates
    muon = muon_terms(step) if shape.muon else []
    if shape.offload_parameters:
        return _parameter_offload_terms(step) + muon
    local = step.trained_share * step.facts.num_parameters() / shape.shards
    terms = [
        attempt(
            "optimizer.memory",
            lambda: local * 34 / rates.memory,
            "parameters / ranks * 34 B / GPU memory: read master, gradient and both moments, write three of them, "
            "write bfloat16, read gradients once more for their norm",
            {"parameters a rank": local},
        )
    ]
    if shape.offload_optimizer:
        on_node = local * shape.gpus_per_node
        terms.append(
            attempt(
                "optimizer.offload",
                lambda: max(local * 8 / rates.pcie, on_node * 16 / rates.host_memory),
                "max(parameters a rank * 8 B / pcie, parameters a node * 16 B / host memory): both moments in and out",
                {"parameters a rank": local, "parameters a node": on_node},
            )
        )
    return terms + muon


def _replay_term(step: StepWork) -> Seconds:
    bytes_a_token = token_routes_bytes(step.facts)
    total = step.packing.tokens * bytes_a_token
    return attempt(
        "router_replay.traffic",
        lambda: total / step.rates.node_network,
        "tokens * layers * top-k * bytes / network of the orchestrator's node",
        {"bytes": total, "bytes a token": bytes_a_token},
    )
