"""Seconds of Muon's step in addition to those of AdamW's."""

from __future__ import annotations

from hpcrl.planning.collectives import RankGroup, all_to_all
from hpcrl.planning.muon import exchanged_parameters, muon_matrices
from hpcrl.planning.times.step_work import StepWork
from hpcrl.planning.times.terms import Seconds, attempt


def muon_terms(step: StepWork) -> list[Seconds]:
    """Return the times of the bfloat16 iteration, divided over the ranks of a copy, and of gathering the matrices."""
    shape, rates = step.shape, step.rates
    operations = muon_matrices(step.facts).operations / shape.shards
    terms = [
        attempt(
            "optimizer.newton_schulz",
            lambda: operations / rates.gemm("bfloat16") / step.busy,
            "5 * (4 * m^2 * n + 2 * m^3) of each matrix of m <= n / ranks / rate / trainer_busy",
            {"operations a rank": operations},
        )
    ]
    dense, experts = exchanged_parameters(step.facts, shards=shape.shards, ep=shape.expert_parallel)
    if not dense and not experts:
        return terms
    everyone = RankGroup.inner(shape.shards, shape.gpus_per_node)
    outer = RankGroup.outer(shape.shards // shape.expert_parallel, shape.expert_parallel, shape.gpus_per_node)
    each = [2 * part / shape.shards for part in (dense, experts)]
    terms.append(
        attempt(
            "optimizer.exchange",
            lambda: (
                2
                * sum(
                    all_to_all(sent, group, rates.all_to_all)
                    for sent, group in zip(each, (everyone, outer), strict=True)
                    if sent
                )
            ),
            "2 * (all_to_all(2 B * dense / ranks, all ranks) + all_to_all(2 B * cut experts / ranks, ranks / EP))",
            {"bytes a rank, dense": each[0], "bytes a rank, experts": each[1]},
        )
    )
    return terms
