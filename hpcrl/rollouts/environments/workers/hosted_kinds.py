"""Environments of every kind as ones with a process of their own, which is what a worker hosts."""

from __future__ import annotations

from typing import Any

from hpcrl.config.environments import CalculatorEnv, CustomEnv, EnvironmentConfig, HostedEnv, WordsEnv
from hpcrl.rollouts.environments.base import Environment
from hpcrl.rollouts.environments.calculator import CalculatorEnvironment
from hpcrl.rollouts.environments.words import WordsEnvironment


def hosted_config(config: EnvironmentConfig) -> HostedEnv:
    """Return the settings of the same environment in a process of its own."""
    if isinstance(config, HostedEnv):
        return config
    return CustomEnv(
        name=config.name,
        kind="custom",
        weight=config.weight,
        latency=config.latency,
        factory=f"{__name__}:make",
        args={"config": config.model_dump(mode="json")},
    )


def make(config: dict[str, Any]) -> Environment:
    """Make an environment that has no process of its own elsewhere, from its settings."""
    if config["kind"] == "words":
        return WordsEnvironment(WordsEnv.model_validate(config))
    return CalculatorEnvironment(CalculatorEnv.model_validate(config))
