"""Makes the record of a step."""

from __future__ import annotations

import time
from dataclasses import asdict

import torch

from hpcrl.dock.wire import BatchStats
from hpcrl.runs.metrics import StepRecord
from hpcrl.trainer.step.metrics import TokenMetrics

Update = tuple[float, float] | None
"""Gradient norm before clipping and learning rate of a step; None where it was skipped."""


def step_record(
    stats: BatchStats,
    tokens: TokenMetrics,
    *,
    attempt: int,
    step: int,
    update: Update,
    phases_s: dict[str, float],
    held_out_loss: float | None = None,
) -> StepRecord:
    """Make the record of a step: its batch, its tokens, what the optimizer did, the phases so far."""
    measured = asdict(tokens)
    measured.pop("tokens")
    return StepRecord(
        time_s=time.time(),
        attempt=attempt,
        step=step,
        reward_mean=stats.reward_mean,
        reward_std=stats.reward_std,
        reward_by_env=stats.reward_by_env,
        reward_parts=stats.reward_parts,
        reward_count=stats.reward_count,
        reward_count_by_env=stats.reward_count_by_env,
        reward_count_by_part=stats.reward_count_by_part,
        staleness_mean=stats.staleness_mean,
        staleness_max=stats.staleness_max,
        staleness_histogram=stats.staleness_histogram,
        tokens=stats.total_tokens,
        sampled_tokens=stats.total_sampled_tokens,
        tokens_per_s=stats.total_tokens / max(sum(phases_s.values()), 1e-9),
        grad_norm=0.0 if update is None else update[0],
        learning_rate=0.0 if update is None else update[1],
        skipped=update is None,
        phases_s=phases_s,
        rollouts=stats.rollouts,
        held_out_loss=held_out_loss,
        teacher_kl=stats.teacher_kl,
        branches_mean=stats.branches_mean,
        branches_max=stats.branches_max,
        prefix_repeated_tokens=stats.prefix_repeated_tokens,
        peak_memory_gib=peak_memory_gib(),
        model_flops=stats.model_flops,
        wait_for_policy_s=stats.wait_for_policy_s,
        **measured,
    )


def peak_memory_gib() -> float | None:
    """Return the most GPU memory that this process has allocated since its start, in GiB; None without a GPU.

    The count of the allocator is not reset: others that watch it, such as a profile of memory, keep their own view.
    """
    # a question to CUDA would begin it in a process that computes on the CPU
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.max_memory_allocated() / 2**30
