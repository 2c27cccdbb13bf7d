"""Estimates over prompts that were sampled several times: pass@k, the mean of k, and intervals by bootstrap.

Samples of one prompt depend on each other: the prompt is what is drawn, and what the bootstrap draws again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95
"""Coverage of intervals."""
RESAMPLES = 2000
"""Number of bootstrap samples of the prompts for an interval."""
_MAX_COUNTS = 1 << 22
"""Maximum numbers of the table of draws that is in memory at once."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over prompts with its interval.

    Attributes
    ----------
    value:
        The mean; None without a prompt.
    low, high:
        Ends of the interval; None where there are fewer than two prompts.
    prompts:
        Number of prompts of the mean.
    """

    value: float | None
    low: float | None
    high: float | None
    prompts: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Estimate the probability that one of ``k`` samples of a prompt passes, without bias.

    With ``n`` samples of which ``c`` pass it is ``1 - C(n - c, k) / C(n, k)``: the share of all choices of ``k`` of the
    samples with one that passes (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).
    It is computed as the product of ``1 - k / i`` over ``i`` from ``n - c + 1`` to ``n``, which does not overflow.

    Raises
    ------
    ValueError
        ``k`` is not in ``[1, samples]``, or ``passed`` not in ``[0, samples]``.
    """
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} needs at least {max(k, 1)} samples of a prompt, and k of at least 1; n is {samples}"
        )
    if not 0 <= passed <= samples:
        raise ValueError(f"passed is {passed}; it must be from 0 to the {samples} samples")
    if samples - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - passed + 1, samples + 1))


def pass_ks(samples: int) -> list[int]:
    """Return the numbers ``k`` that pass@k is reported for: the powers of two up to ``samples``, and ``samples``."""
    return sorted({1 << i for i in range(samples.bit_length())} | {samples}) if samples > 0 else []


def estimate(values: Sequence[float], *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES) -> Estimate:
    """Estimate a mean over prompts.

    Parameters
    ----------
    values:
        One finite number a prompt.
    seed:
        Seed of the bootstrap: equal values and seeds give equal intervals.
    """
    interval = bootstrap_interval(values, seed=seed, level=level, resamples=resamples)
    low, high = (None, None) if interval is None else interval
    value = math.fsum(values) / len(values) if values else None
    return Estimate(value=value, low=low, high=high, prompts=len(values))


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the percentile interval of the mean of ``values [prompts]`` by bootstrap over prompts.

    Prompts are drawn with replacement ``resamples`` times, as many as there are; the ends are the ``(1 - level) / 2``
    and ``(1 + level) / 2`` quantiles of these means. None for fewer than two prompts, of which nothing is known.

    Raises
    ------
    ValueError
        A value is not finite, or ``level`` is not between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level is {level}, and must be between 0 and 1")
    given = np.asarray(values, np.float64)
    if not np.isfinite(given).all():
        raise ValueError("a value is not finite")
    if len(given) < 2:
        return None
    generator = np.random.default_rng(seed)
    means: list[NDArray[np.float64]] = []
    step, left = max(1, _MAX_COUNTS // len(given)), resamples
    while left > 0:
        draws = generator.integers(0, len(given), size=(min(step, left), len(given)))
        means.append(given[draws].mean(axis=1))
        left -= len(draws)
    low, high = np.quantile(np.concatenate(means), [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)
