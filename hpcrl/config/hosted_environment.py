"""Settings that environments share, and those of every environment in a process of its own."""

from __future__ import annotations

from typing import Any

from hpcrl.config.base import Fraction, Name, NonNegativeFloat, PositiveFloat, StrictModel


class LatencyConfig(StrictModel):
    """Extra waiting time of a rollout, as a slow tool or test suite would cause; for measurements."""

    median_s: NonNegativeFloat = 0.0
    """Waiting time of an ordinary rollout in seconds."""
    tail_share: Fraction = 0.0
    """Share of rollouts that take longer."""
    tail_factor: PositiveFloat = 10.0
    """Factor by which these take longer."""


class EnvironmentBase(StrictModel):
    name: Name
    """Name in metrics; unique in the recipe."""
    weight: NonNegativeFloat = 1.0
    """Share of this environment in the prompts, relative to the others. 0: it is never trained on, and only sets of
    ``evaluation.sets`` and ``hpcrl eval`` that name it ask its held-out prompts."""
    latency: LatencyConfig = LatencyConfig()
    """Extra waiting time, for measurements."""


class HostedEnv(EnvironmentBase):
    """An environment that runs in a process of its own."""

    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` make it, too. Set ``false`` if it can only be created on a node."""
    start_timeout_s: PositiveFloat = 300.0
    """Timeout in seconds for creating the environment: imports, and the factory or reading the file."""
    answer_timeout_s: PositiveFloat = 120.0
    """Timeout in seconds for a prompt, and for a blocked event loop of the environment's process; then the process is
    restarted."""
    turn_timeout_s: PositiveFloat = 3600.0
    """Timeout in seconds for the environment's own work (tools, tests, judging) between two replies of the policy; a
    rollout that takes longer is dropped."""

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return ``package.module:Name`` of what makes it in its process, and the keyword arguments for that."""
        raise NotImplementedError

    def variables(self) -> dict[str, str]:
        """Return variables of its process in addition to those of the orchestrator."""
        return {}
