"""Limits of the sandboxes of an environment."""

from __future__ import annotations

from hpcrl.config.harness_sandbox import HarnessSandboxConfig
from hpcrl.config.rewards import CodeReward
from hpcrl.config.swe import SweEnv
from hpcrl.sandboxes import SandboxLimits

_GIB = 1 << 30


def sandbox_limits(config: SweEnv | HarnessSandboxConfig | CodeReward) -> SandboxLimits:
    """Return the limits of a sandbox as the recipe sets them; the others are the defaults."""
    return SandboxLimits(
        memory_bytes=int(config.memory_gib * _GIB),
        disk_bytes=int(config.disk_gib * _GIB),
        processes=config.processes,
    )
