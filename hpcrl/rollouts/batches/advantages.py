"""Advantages from the rewards of a group. One number a rollout; it applies to all its sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.algorithm import CustomAdvantageConfig
from hpcrl.extend import ExtensionError, call_extension, extension_path, import_object

_EPSILON = 1e-6
_MAX_ADVANTAGE = 1e9
"""Maximum size of an advantage. Squares of gradients, which grow with advantages, stay finite in float32."""


def group_advantages(
    rewards: Sequence[float], lengths: Sequence[int], kind: Literal["grpo", "mean_baseline"] | CustomAdvantageConfig
) -> NDArray[np.float64]:
    """Advantages of the rollouts of one prompt.

    ``mean_baseline``: ``A_i = r_i - mean(r)``. ``grpo``: ``A_i = (r_i - mean(r)) / (std(r) + 1e-6)`` with the
    population standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2). Where all rewards are equal,
    both are exactly zero. Any other is a function of the user's own (`custom_advantages`).

    Parameters
    ----------
    rewards, lengths:
        Reward and sampled tokens of each rollout.

    Returns
    -------
    ndarray
        ``[len(rewards)]`` float64, all finite.

    Raises
    ------
    ValueError
        A reward is not finite: one of them would make the advantages of the whole group so.
    ExtensionError
        A function of the user's own cannot be imported, raised, or returned what are no advantages.
    """
    values: NDArray[np.float64] = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group are not finite: {values.tolist()}")
    if isinstance(kind, CustomAdvantageConfig):
        return custom_advantages(values, np.asarray(lengths, dtype=np.int64), kind)
    if values.size == 0 or np.all(values == values[0]):
        return np.zeros_like(values)  # not a rounding error divided by epsilon
    centred: NDArray[np.float64] = values - values.mean()
    if kind == "mean_baseline":
        return centred
    return centred / float(values.std() + _EPSILON)


def custom_advantages(
    rewards: NDArray[np.float64], lengths: NDArray[np.int64], config: CustomAdvantageConfig
) -> NDArray[np.float64]:
    """Call a function of the user's own, and check what it returns.

    Raises
    ------
    ExtensionError
        The function cannot be imported or raised, or its result is not one finite number for each rollout.
    """
    path, function = _function(config.function)
    # copies: the function may write into what it gets
    found = call_extension(
        path, lambda: function(rewards.copy(), lengths.copy(), **config.parameters), "correct it or its parameters"
    )
    hint = "return one finite number for each rollout"
    try:
        advantages = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ExtensionError(f"{path} returned a {type(found).__name__}: {error}", hint) from error
    if advantages.shape != rewards.shape:
        raise ExtensionError(f"{path} returned {advantages.shape} for {len(rewards)} rollouts", hint)
    if not (np.abs(advantages) <= _MAX_ADVANTAGE).all():
        raise ExtensionError(f"{path} returned {advantages.tolist()} for the rewards {rewards.tolist()}", hint)
    return advantages


@cache
def _function(name: str) -> tuple[str, Callable[..., Any]]:
    """Return the path and the function: it is found once, and called for each group."""
    path = extension_path("advantage", name)
    return path, import_object(path, called="function")
