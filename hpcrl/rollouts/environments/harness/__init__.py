"""Tasks for programs that speak OpenAI's API with the policy."""

from typing import Any

from hpcrl.rollouts.environments.base import Environment

__all__ = ["make"]


def make(config: dict[str, Any]) -> Environment:
    """Make the environment in its process, from the JSON of its configuration (ConfigError where it cannot be)."""
    import msgspec  # noqa: PLC0415 - who names this package alone needs none of it

    from hpcrl.config.environments import HarnessEnv  # noqa: PLC0415
    from hpcrl.rollouts.environments.harness.environment import HarnessEnvironment  # noqa: PLC0415

    return HarnessEnvironment(HarnessEnv.model_validate_json(msgspec.json.encode(config)))
