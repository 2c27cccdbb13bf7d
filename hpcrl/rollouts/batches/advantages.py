"""Advantages from the rewards of a group. One number a rollout; it applies to all its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["group_advantages"]

_EPSILON = 1e-6


def group_advantages(rewards: Sequence[float], kind: Literal["grpo", "mean_baseline"]) -> NDArray[np.float64]:
    """Advantages of the rollouts of one prompt.

    ``mean_baseline``: ``A_i = r_i - mean(r)``. ``grpo``: ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` with the
    population standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2). Where all rewards are equal,
    both are exactly zero.

    Returns
    -------
    ndarray
        ``[len(rewards)]`` float64, all finite.

    Raises
    ------
    ValueError
        A reward is not finite: one of them would make the advantages of the whole group so.
    """
    values: NDArray[np.float64] = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group are not finite: {values.tolist()}")
    if values.size == 0 or np.all(values == values[0]):
        return np.zeros_like(values)  # not a rounding error divided by epsilon
    centred: NDArray[np.float64] = values - values.mean()
    if kind == "mean_baseline":
        return centred
    return centred / float(values.std() + _EPSILON)
