"""Limits of sandboxes as recipes set them."""

from __future__ import annotations

import pytest

from hpcrl.config.harness_sandbox import HarnessSandboxConfig
from hpcrl.config.swe import SweEnv
from hpcrl.rollouts.environments.sandbox_limits import sandbox_limits
from hpcrl.sandboxes import SandboxLimits

SETTINGS = {"memory_gib": 0.5, "disk_gib": 3, "processes": 7}


@pytest.mark.parametrize(
    "config",
    [
        HarnessSandboxConfig.model_validate(SETTINGS),
        SweEnv.model_validate({"name": "bugs", "kind": "swe", "tasks": "tasks.jsonl", **SETTINGS}),
    ],
    ids=["harness", "swe"],
)
def test_three_limits_are_those_of_the_recipe_and_the_others_the_defaults(
    config: SweEnv | HarnessSandboxConfig,
) -> None:
    assert sandbox_limits(config) == SandboxLimits(memory_bytes=1 << 29, disk_bytes=3 << 30, processes=7)
