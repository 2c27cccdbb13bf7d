"""Settings of the sandboxes that hpcrl makes for environments of a recipe."""

from __future__ import annotations

from hpcrl.config.environments import HarnessEnv, TaskFileEnv
from hpcrl.config.harness_sandbox import HarnessSandboxConfig
from hpcrl.config.recipe import EnvironmentConfig
from hpcrl.config.rewards import CodeReward
from hpcrl.config.swe import SweEnv


def sandbox_settings(environment: EnvironmentConfig) -> list[SweEnv | HarnessSandboxConfig | CodeReward]:
    """Return the settings of an environment's sandboxes; empty where hpcrl makes none for it.

    Sandboxes that the code of a ``custom`` environment makes are not known.
    """
    if isinstance(environment, SweEnv):
        return [environment]
    found: list[SweEnv | HarnessSandboxConfig | CodeReward] = []
    if isinstance(environment, HarnessEnv) and environment.sandbox is not None:
        found.append(environment.sandbox)
    if isinstance(environment, TaskFileEnv):
        found += [reward for reward in environment.rewards if isinstance(reward, CodeReward)]
    return found


def needs_bubblewrap(environment: EnvironmentConfig) -> bool:
    """Return whether bubblewrap makes sandboxes of an environment, whose limits `hpcrl env sandbox` tries."""
    return any(
        not isinstance(each, SweEnv) or each.sandbox_backend == "bubblewrap" for each in sandbox_settings(environment)
    )
