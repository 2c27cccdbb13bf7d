"""From consumed groups to what the trainer gets: advantages, statistics, packed shards, and a file for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import joined as joined_routes
from hpcrl.dock.wire import BatchShard, BatchStats, MicroBatch, encode_shard
from hpcrl.rollouts.batches.advantages import group_advantages
from hpcrl.rollouts.batches.packing import pack
from hpcrl.rollouts.records import Group, Rollout

__all__ = ["Batch", "build_batch"]

_MAX_TEXT_CHARACTERS = 4000
"""Of a rollout in the file for people; long ones lose their middle."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one step.

    Attributes
    ----------
    shards:
        Encoded shard of each trainer rank.
    lines:
        The consumed rollouts as JSON lines.
    """

    step: int
    shards: list[bytes]
    lines: bytes


@dataclass(frozen=True, slots=True)
class _Sample:
    """A rollout with what only the batch knows."""

    group: Group
    rollout: Rollout
    advantage: float
    staleness: int


def build_batch(
    groups: Sequence[Group],
    *,
    step: int,
    world_size: int,
    recipe: Recipe,
    counters: Mapping[str, float],
    decode: Callable[[Sequence[int]], str],
    cost: Callable[[int], float],
) -> Batch:
    """Build the batch of ``step``. Pure: equal input gives equal bytes.

    Parameters
    ----------
    groups:
        In index order; their rollouts in member order. The batch keeps this order within a micro-batch.
    counters:
        For `hpcrl.dock.wire.BatchStats.rollouts`.
    decode:
        Token ids to text.
    cost:
        Of training on a rollout of so many tokens; see `pack`.
    """
    samples = [
        _Sample(group, rollout, float(advantage), step - 1 - rollout.first_version)
        for group in groups
        for rollout, advantage in zip(
            group.rollouts,
            group_advantages([r.reward for r in group.rollouts], recipe.algorithm.advantage),
            strict=True,
        )
    ]
    stats = _stats(samples, counters)
    lengths = [len(sample.rollout.token_ids) for sample in samples]
    layout = pack(lengths, budget=recipe.trainer.micro_batch_tokens, world_size=world_size, cost=cost)
    shards = [
        encode_shard(
            BatchShard(
                step=step,
                rank=rank,
                world_size=world_size,
                micro_batches=[_micro_batch([samples[i] for i in indices]) for indices in micro_batches],
                stats=stats,
            )
        )
        for rank, micro_batches in enumerate(layout)
    ]
    encoder = msgspec.json.Encoder()
    lines = b"".join(encoder.encode(_line(sample, decode)) + b"\n" for sample in samples)
    return Batch(step, shards, lines)


def _micro_batch(samples: Sequence[_Sample]) -> MicroBatch:
    def joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
        return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)

    rollouts = [sample.rollout for sample in samples]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return MicroBatch(
        token_ids=joined([rollout.token_ids for rollout in rollouts], np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=joined([rollout.sampled for rollout in rollouts], np.uint8),
        logprobs=joined([rollout.logprobs for rollout in rollouts], np.float32),
        versions=joined([rollout.versions for rollout in rollouts], np.int32),
        advantages=joined(
            [sample.rollout.sampled.astype(np.float32) * np.float32(sample.advantage) for sample in samples], np.float32
        ),
        routed_experts=joined_routes([rollout.routed_experts for rollout in rollouts], lengths),
        rollouts=[(sample.group.index, sample.rollout.member) for sample in samples],
    )


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
        total_tokens=sum(len(sample.rollout.token_ids) for sample in samples),
        total_sampled_tokens=sum(sample.rollout.sampled_tokens for sample in samples),
        rollouts=dict(counters),
    )


def _line(sample: _Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    group, rollout = sample.group, sample.rollout
    text = decode(rollout.token_ids.tolist())
    if len(text) > _MAX_TEXT_CHARACTERS:
        half = _MAX_TEXT_CHARACTERS // 2
        text = f"{text[:half]} … {text[-half:]}"
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
        "tokens": len(rollout.token_ids),
        "sampled_tokens": rollout.sampled_tokens,
        "seconds": round(rollout.seconds, 3),
        "ended_s": round(rollout.ended_s, 3),
        "turns": rollout.turns,
        "text": text,
    }
