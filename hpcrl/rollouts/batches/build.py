"""Build the trainer's input from consumed groups: advantages, statistics, packed shards, and a file for people.

Shards identify rollouts and locate their columns. Columns are read here only for the text for people.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcrl.config.recipe import Recipe
from hpcrl.dock.ledger.entries import PayloadPlace
from hpcrl.dock.warehouse.interface import Location
from hpcrl.dock.wire import BatchStats, ReferencedShard, Sample, encode_shard
from hpcrl.rollouts.batches.advantages import group_advantages
from hpcrl.rollouts.batches.packing import pack
from hpcrl.rollouts.core.records import Group, StoredRollout


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of one step.

    Attributes
    ----------
    shards:
        Encoded shard of each trainer rank.
    lines:
        Consumed rollouts as JSON lines.
    """

    step: int
    shards: list[bytes]
    lines: bytes


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rollout with the values that only the batch determines."""

    group: Group
    rollout: StoredRollout
    advantage: float
    staleness: int


def build_batch(
    groups: Sequence[Group],
    *,
    step: int,
    world_size: int,
    recipe: Recipe,
    counters: Mapping[str, float],
    text: Callable[[PayloadPlace], str],
    cost: Callable[[int], float],
    location: Location | None,
    payload_dir: Path,
    flops: Callable[[int], float] | None = None,
    wait_for_policy_s: float | None = None,
) -> Batch:
    """Build the batch of ``step``. Equal input gives equal bytes.

    Parameters
    ----------
    groups:
        In index order; their rollouts in member order. The batch keeps this order within a micro-batch.
    counters:
        Counters for `hpcrl.dock.wire.BatchStats.rollouts`.
    text:
        Returns the text of a rollout's tokens, for people.
    cost:
        Returns the cost of training on a sequence from its number of tokens; see `pack`.
    location, payload_dir:
        Locations of columns: in memory, and on the shared filesystem.
    flops:
        Returns the operations of training on a sequence from its number of tokens; None where they are unknown.
    wait_for_policy_s:
        See `hpcrl.runs.metrics.StepRecord`.
    """
    distillation = recipe.algorithm.distillation
    weight = 1.0 if distillation is None else distillation.reward_weight
    samples = [
        _Sample(group, rollout, weight * float(advantage), step - 1 - rollout.first_version)
        for group in groups
        for rollout, advantage in zip(
            group.rollouts,
            group_advantages(
                [r.reward for r in group.rollouts],
                [r.sampled_tokens for r in group.rollouts],
                recipe.algorithm.advantage,
            ),
            strict=True,
        )
    ]
    sequences = [reference for sample in samples for reference in _references(sample)]
    lengths = [sequence.tokens for sequence in sequences]
    stats = msgspec.structs.replace(
        _stats(samples, counters),
        environments=_environments(groups),
        model_flops=None if flops is None else math.fsum(map(flops, lengths)),
        wait_for_policy_s=wait_for_policy_s,
    )
    layout = pack(lengths, budget=recipe.trainer.micro_batch_tokens, world_size=world_size, cost=cost)
    shards = [
        encode_shard(
            ReferencedShard(
                step=step,
                rank=rank,
                world_size=world_size,
                micro_batches=[[sequences[i] for i in indices] for indices in micro_batches],
                stats=stats,
                location=location,
                payload_dir=str(payload_dir),
                teacher_weight=0.0 if distillation is None else distillation.coefficient,
            )
        )
        for rank, micro_batches in enumerate(layout)
    ]
    encoder = msgspec.json.Encoder()
    lines = b"".join(encoder.encode(_line(sample, text(sample.rollout.place))) + b"\n" for sample in samples)
    return Batch(step, shards, lines)


def _references(sample: _Sample) -> list[Sample]:
    """Return the sequences of a rollout: each is packed by itself, as no other part of it is in its attention."""
    rollout = sample.rollout
    whole = Sample(
        group=sample.group.index,
        member=rollout.member,
        tokens=rollout.tokens,
        advantage=sample.advantage,
        place=rollout.place,
        counts_as=rollout.counts_as,
    )
    if len(rollout.lengths) <= 1:
        return [whole]
    begins = accumulate(rollout.lengths, initial=0)
    return [
        msgspec.structs.replace(whole, tokens=tokens, sequence=number, begin=begin, rollout_tokens=rollout.tokens)
        for number, (tokens, begin) in enumerate(zip(rollout.lengths, begins, strict=False))
    ]


def _stats(samples: Sequence[_Sample], counters: Mapping[str, float]) -> BatchStats:
    rewards = np.asarray([sample.rollout.reward for sample in samples], dtype=np.float64)
    by_env: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        name = sample.group.environment
        by_env[name].append(sample.rollout.reward)
        for part, value in sample.rollout.parts.items():
            parts[f"{name}/{part}"].append(value)
    staleness = [sample.staleness for sample in samples]
    histogram = Counter(staleness)
    return BatchStats(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        reward_by_env={name: float(np.mean(values)) for name, values in sorted(by_env.items())},
        reward_parts={name: float(np.mean(values)) for name, values in sorted(parts.items())},
        staleness_mean=float(np.mean(staleness)),
        staleness_max=max(staleness),
        staleness_histogram={str(lag): histogram[lag] for lag in sorted(histogram)},
        total_tokens=sum(sample.rollout.tokens for sample in samples),
        total_sampled_tokens=sum(sample.rollout.sampled_tokens for sample in samples),
        rollouts={name: value for name, value in counters.items() if math.isfinite(value)},
        reward_count=len(samples),
        reward_count_by_env={name: len(values) for name, values in sorted(by_env.items())},
        reward_count_by_part={name: len(values) for name, values in sorted(parts.items())},
        teacher_kl=_teacher_kl([sample.rollout for sample in samples]),
        branches_mean=float(np.mean([sample.rollout.branches for sample in samples])),
        branches_max=max(sample.rollout.branches for sample in samples),
        prefix_repeated_tokens=sum(sample.rollout.repeated_tokens for sample in samples),
    )


def _environments(groups: Sequence[Group]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for group in groups:
        found[group.environment].append(group.index)
    return dict(sorted(found.items()))


def _teacher_kl(rollouts: Sequence[StoredRollout]) -> float | None:
    """Return the mean over sampled tokens of the engine's log-probability minus the teacher's; None without any."""
    scored = [rollout for rollout in rollouts if rollout.teacher_divergence is not None]
    tokens = sum(rollout.sampled_tokens for rollout in scored)
    return sum(rollout.teacher_divergence or 0.0 for rollout in scored) / tokens if tokens else None


def _line(sample: _Sample, text: str) -> dict[str, Any]:
    group, rollout = sample.group, sample.rollout
    return {
        "group": group.index,
        "member": rollout.member,
        "environment": group.environment,
        "prompt_index": group.prompt_index,
        "reward": rollout.reward,
        "parts": rollout.parts,
        "advantage": sample.advantage,
        "staleness": sample.staleness,
        "first_version": rollout.first_version,
        "last_version": rollout.last_version,
        "tokens": rollout.tokens,
        "sampled_tokens": rollout.sampled_tokens,
        "seconds": round(rollout.seconds, 3),
        "ended_s": round(rollout.ended_s, 3),
        "branches": rollout.branches,
        "turns": rollout.turns,
        "text": text,
    }
