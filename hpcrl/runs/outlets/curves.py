"""Names of curves as the field has them, for the sinks that hpcrl brings; docs/observing.md has the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Curve(NamedTuple):
    """A curve of a run.

    Attributes
    ----------
    name:
        Name in sinks.
    unit:
        Its unit; ``1`` for shares and ratios.
    better:
        The direction in which it should move or stay.
    meaning:
        Definition, in a sentence.
    """

    name: str
    unit: str
    better: Literal["up", "down", "low", "high", "steady", "-"]
    meaning: str


_FLEET = "{}, by engine, when the step was sent: `mean`, `min` and `max`."

CURVES: dict[str, Curve] = {
    "reward_mean": Curve("reward/mean", "1", "up", "Mean reward of the rollouts of the batch."),
    "reward_std": Curve("reward/std", "1", "steady", "Standard deviation of these rewards."),
    "reward_count": Curve("reward/count", "rollouts", "steady", "Rollouts that the mean is over."),
    "heldout_reward": Curve("heldout/reward", "1", "up", "Mean reward on held-out prompts."),
    "heldout_count": Curve("heldout/count", "rollouts", "steady", "Rollouts that this mean is over."),
    "heldout_failed": Curve("heldout/failed", "rollouts", "low", "Held-out rollouts that failed."),
    "held_out_loss": Curve("heldout/loss", "nats", "down", "Cross entropy on held-out conversations."),
    "loss": Curve("loss/policy", "1", "-", "Mean loss of trained tokens; its size says little by itself."),
    "entropy": Curve("entropy/all/mean", "nats", "steady", "Entropy of the trainer's distribution at trained tokens."),
    "mismatch_kl": Curve("mismatch_kl/all/mean", "nats", "low", "KL of engine and trainer at trained tokens (k3)."),
    "kl_ent_ratio": Curve("kl_ent_ratio/mean", "1", "low", "Mismatch KL divided by the entropy."),
    "masked_share": Curve("is_masked/mean", "1", "low", "Share of trained tokens that the loss masks or cuts."),
    "masked_low_share": Curve(
        "is_masked_low/mean", "1", "low", "The part of it whose probability is lower in the trainer than in the engine."
    ),
    "masked_high_share": Curve(
        "is_masked_high/mean", "1", "low", "The part of it whose probability is higher in the trainer."
    ),
    "ess": Curve("importance/ess", "1", "high", "Effective sample size of importance ratios, as a share of tokens."),
    "reference_kl": Curve("reference_kl/mean", "nats", "low", "KL of trainer and reference model (k3)."),
    "teacher_kl": Curve("teacher_kl/mean", "nats", "down", "KL of engine and teacher."),
    "grad_norm": Curve("optim/grad_norm", "1", "steady", "Norm of the gradient before it is clipped."),
    "learning_rate": Curve("optim/lr", "1", "-", "Learning rate of the step."),
    "skipped": Curve("optim/skipped", "1", "low", "1 where the gradient was not finite and nothing was changed."),
    "nonfinite_tokens": Curve("optim/nonfinite_tokens", "tokens", "low", "Tokens without finite log-probabilities."),
    "staleness_mean": Curve("off_policy/mean", "versions", "low", "Mean staleness of the rollouts of the batch."),
    "staleness_max": Curve("off_policy/max", "versions", "low", "Largest staleness in the batch."),
    "staleness_p50": Curve("off_policy/p50", "versions", "low", "Median staleness of the rollouts of the batch."),
    "staleness_p90": Curve("off_policy/p90", "versions", "low", "90 % of the rollouts are at most as stale."),
    "stale_rollouts": Curve(
        "off_policy/dropped", "rollouts", "low", "Rollouts dropped or aborted as too old, since the start of the run."
    ),
    "rollouts/in_queue": Curve(
        "rollouts/in_queue", "rollouts", "low", "Finished rollouts that wait for the trainer, as the batch is taken."
    ),
    "rollouts/in_queue_staleness_mean": Curve(
        "off_policy/in_queue/mean", "versions", "low", "Mean staleness that these have if the next step takes them."
    ),
    "rollouts/in_queue_staleness_max": Curve("off_policy/in_queue/max", "versions", "low", "Largest of these."),
    "rollouts/in_flight": Curve(
        "rollouts/in_flight", "rollouts", "steady", "Rollouts that run, as the batch is taken."
    ),
    "rollouts/in_flight_staleness_mean": Curve(
        "off_policy/in_flight/mean", "versions", "low", "Mean staleness that these have, from their first request on."
    ),
    "rollouts/in_flight_staleness_max": Curve("off_policy/in_flight/max", "versions", "low", "Largest of these."),
    "length_mean": Curve("length/all/mean", "tokens", "-", "Mean tokens of a rollout, prompts and tools included."),
    "sampled_length_mean": Curve("length/sampled/mean", "tokens", "-", "Mean tokens of a rollout that were sampled."),
    "sampled_length_p50": Curve("length/sampled/p50", "tokens", "-", "Median of these."),
    "sampled_length_p90": Curve("length/sampled/p90", "tokens", "-", "90 % of the rollouts have at most as many."),
    "sampled_length_max": Curve("length/sampled/max", "tokens", "-", "The most that a rollout of the batch has."),
    "gpu_hours": Curve("perf/gpu_hours", "GPU h", "low", "GPU-hours that all attempts have held until the step."),
    "fleet_engines": Curve("inference/engines", "engines", "high", "Engines that the orchestrator knows."),
    "fleet_silent": Curve(
        "inference/engines_silent", "engines", "low", "Engines that do not answer, or sample nothing."
    ),
    "tokens": Curve("perf/tokens", "tokens", "-", "Tokens in the batch."),
    "sampled_tokens": Curve("perf/sampled_tokens", "tokens", "-", "Tokens in the batch that the policy sampled."),
    "tokens_per_s": Curve("perf/throughput", "tokens/s", "high", "Tokens of the batch by seconds of the step."),
    "tokens_per_s_per_gpu": Curve(
        "perf/throughput_per_gpu", "tokens/s", "high", "The same by GPUs of the trainer; not known without GPUs."
    ),
    "mfu": Curve(
        "perf/mfu",
        "1",
        "high",
        "Operations of the batch, forward and backward, by those of the trainer's GPUs at their peak in the seconds of "
        "the step (PaLM, arXiv 2204.02311, appendix B).",
    ),
    "peak_memory_gib": Curve(
        "perf/peak_memory", "GiB", "steady", "The most GPU memory that rank 0 of the trainer has used since its start."
    ),
    "step_s": Curve("time/step", "s", "low", "Seconds of the step: the sum of its phases."),
    "phases_s/wait_batch": Curve("time/wait_for_batch", "s", "low", "Seconds of waiting for rollouts."),
    "wait_for_policy_s": Curve(
        "time/wait_for_policy",
        "s",
        "low",
        "Seconds since the batch before in which rollouts had room, and waited for engines to serve a newer version.",
    ),
    "phases_s/publish": Curve("time/broadcast_weights", "s", "low", "Seconds for which a hand-off blocked the step."),
    "phases_s/checkpoint": Curve("time/save_ckpt", "s", "low", "Seconds for which a checkpoint blocked the step."),
    "routing_mismatch": Curve("router/mismatch", "1", "low", "Share of tokens and layers with other routed experts."),
    "replayed_share": Curve("router/replayed_share", "1", "high", "Share of tokens that took the engine's experts."),
    "routing_fallback_share": Curve(
        "r3/routed_experts_fallback_token_route_fraction",
        "1",
        "low",
        "Share of tokens whose experts the trainer's own router chose, with router replay.",
    ),
    "replayed_mismatch_kl": Curve("mismatch_kl/replayed/mean", "nats", "low", "Mismatch KL with router replay."),
    "unreplayed_mismatch_kl": Curve("mismatch_kl/unreplayed/mean", "nats", "low", "Mismatch KL without it."),
    "branches_mean": Curve("branches/mean", "sequences", "-", "Sequences of a rollout."),
    "branches_max": Curve("branches/max", "sequences", "-", "Most sequences of a rollout."),
}
"""Curves by the name of the field in `hpcrl.runs.metrics.StepRecord`, of a held-out evaluation, or of a number of
`hpcrl.runs.outlets.derived`."""

FAMILIES: dict[str, Curve] = {
    "reward_by_env/": Curve("reward/", "1", "up", "The same mean of one environment."),
    "reward_count_by_env/": Curve("reward_count/", "rollouts", "steady", "Rollouts of that mean."),
    "reward_parts/": Curve("reward_part/", "1", "-", "Mean of a part of the reward, by environment and part."),
    "reward_count_by_part/": Curve("reward_part_count/", "rollouts", "steady", "Rollouts of that mean."),
    "heldout_by_env/": Curve("heldout/reward/", "1", "up", "Mean held-out reward of one environment."),
    "heldout_parts/": Curve("heldout/part/", "1", "-", "Mean of a part of the held-out reward."),
    "mismatch_kl_by_lag/": Curve("mismatch_kl/lag/", "nats", "low", "Mismatch KL of tokens by their lag in versions."),
    "entropy_by_env/": Curve("entropy/env/", "nats", "steady", "Entropy at trained tokens of one environment."),
    "mismatch_kl_by_env/": Curve("mismatch_kl/env/", "nats", "low", "Mismatch KL of one environment (k3)."),
    "routing_mismatch_by_lag/": Curve("router/mismatch_lag/", "1", "low", "Router mismatch by lag in versions."),
    "unknown_routing/": Curve("router/unknown/", "1", "low", "Share of tokens without experts of an engine, by kind."),
    "staleness_histogram/": Curve("off_policy/histogram/", "rollouts", "-", "Rollouts by staleness."),
    "phases_s/": Curve("time/", "s", "low", "Seconds of another phase of the step."),
    "fleet/kv_usage/": Curve(
        "inference/agg/kv_cache_usage_perc/", "1", "-", _FLEET.format("Share of the KV cache in use")
    ),
    "fleet/running/": Curve(
        "inference/agg/num_requests_running/", "requests", "-", _FLEET.format("Requests in the batch")
    ),
    "fleet/waiting/": Curve(
        "inference/agg/num_requests_waiting/", "requests", "low", _FLEET.format("Requests in the queue")
    ),
    "fleet/prefix_hit_rate/": Curve(
        "inference/agg/prefix_cache_hit_rate/", "1", "high", _FLEET.format("Share of prompt tokens found in the cache")
    ),
    "fleet/preemptions/": Curve(
        "inference/agg/num_preemptions_total/", "requests", "low", _FLEET.format("Requests that lost their KV cache")
    ),
    "fleet/tokens_per_s/": Curve(
        "inference/agg/generation_tokens_per_s/", "tokens/s", "high", _FLEET.format("Tokens sampled per second")
    ),
    "fleet/versions_behind/": Curve(
        "inference/agg/versions_behind/", "versions", "low", _FLEET.format("Versions behind the newest")
    ),
    "loss_metrics/": Curve("loss_metrics/", "-", "-", "What a loss of your own measures."),
    "rollouts/": Curve("rollouts/", "-", "-", "Counters of the orchestrator: docs/rollouts.md."),
}
"""The same for names that begin so; what follows stays as it is."""


def by_curve(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by their names in sinks."""
    return {curve_name(name): value for name, value in metrics.items()}


def by_summary(summary: Mapping[str, float]) -> dict[str, float]:
    """Return the final numbers of a run by their names in sinks."""
    return {f"final/{name}": value for name, value in summary.items()}


def curve_name(name: str) -> str:
    """Return the name of a metric in sinks; one without an entry keeps its own.

    A whole name in `CURVES` counts before a family: the field has names of its own for some phases of a step.
    """
    if name in CURVES:
        return CURVES[name].name
    for prefix, curve in FAMILIES.items():
        if name.startswith(prefix):
            return curve.name + name.removeprefix(prefix)
    return name
