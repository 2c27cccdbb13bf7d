"""Summary of the samples of an evaluation, by environment and together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from hpcrl.evaluation.statistics import Estimate, estimate, pass_at_k, pass_ks

FailurePolicy = Literal["zero", "exclude"]
"""Weight of failed samples: the reward 0, or not at all (``evaluation.failures`` of a recipe)."""


_TOLERANCE = 1e-9


class ScoredSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a prompt.

    Attributes
    ----------
    prompt:
        Its number within its environment.
    reward:
        None where the rollout failed.
    truncated:
        The last reply was cut at a limit.
    """

    environment: str
    prompt: int
    reward: float | None
    truncated: bool = False


class SampleSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates over the prompts of one environment, or of all.

    Attributes
    ----------
    prompts, samples:
        All that were tried.
    failed:
        Samples whose rollout ended without a reward.
    truncated:
        Samples that were cut at a limit of tokens.
    passed:
        Samples with at least ``pass_reward``.
    mean:
        Mean of the rewards: the mean over prompts of the mean over the samples of each.
    pass_at:
        Estimates of pass@k by ``k``. With ``failures`` ``exclude`` a prompt with fewer than ``k`` samples left is in
        none.
    """

    prompts: int
    samples: int
    failed: int
    truncated: int
    passed: int
    pass_reward: float
    failures: FailurePolicy
    mean: Estimate
    pass_at: dict[int, Estimate]


def summarise_by_environment(
    samples: Sequence[ScoredSample], *, k: int, pass_reward: float, failures: FailurePolicy, seed: int = 0
) -> dict[str, SampleSummary]:
    """Summarise each environment by itself, in the order in which they come first."""
    names = list(dict.fromkeys(sample.environment for sample in samples))
    return {
        name: summarise(
            (sample for sample in samples if sample.environment == name),
            k=k,
            pass_reward=pass_reward,
            failures=failures,
            seed=seed,
        )
        for name in names
    }


def summarise(
    samples: Iterable[ScoredSample], *, k: int, pass_reward: float, failures: FailurePolicy, seed: int = 0
) -> SampleSummary:
    """Summarise samples, each prompt with the same weight.

    Parameters
    ----------
    k:
        Samples that were tried of each prompt: pass@k is estimated up to it.
    pass_reward:
        Minimum reward of a sample that passes.
    seed:
        Seed of the bootstrap.
    """
    by_prompt: dict[tuple[str, int], list[ScoredSample]] = {}
    for sample in samples:
        by_prompt.setdefault((sample.environment, sample.prompt), []).append(sample)
    every = [sample for each in by_prompt.values() for sample in each]
    counted = [_rewards(each, failures) for each in by_prompt.values()]
    counted = [rewards for rewards in counted if rewards]
    passes = [(len(rewards), sum(_passes(reward, pass_reward) for reward in rewards)) for rewards in counted]
    return SampleSummary(
        prompts=len(by_prompt),
        samples=len(every),
        failed=sum(sample.reward is None for sample in every),
        truncated=sum(sample.truncated for sample in every),
        passed=sum(sample.reward is not None and _passes(sample.reward, pass_reward) for sample in every),
        pass_reward=pass_reward,
        failures=failures,
        mean=estimate([sum(rewards) / len(rewards) for rewards in counted], seed=seed),
        pass_at={
            each: estimate([pass_at_k(n, c, each) for n, c in passes if n >= each], seed=seed) for each in pass_ks(k)
        },
    )


def _passes(reward: float, pass_reward: float) -> bool:
    # the sum of correct parts may differ from the maximum by a rounding error
    return reward >= pass_reward - _TOLERANCE


def _rewards(samples: Sequence[ScoredSample], failures: FailurePolicy) -> list[float]:
    """Return the rewards of a prompt that count."""
    if failures == "zero":
        return [0.0 if sample.reward is None else sample.reward for sample in samples]
    return [sample.reward for sample in samples if sample.reward is not None]
