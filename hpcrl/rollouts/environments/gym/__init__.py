"""Tasks of the library ``reasoning_gym``."""

from typing import Any

from hpcrl.rollouts.environments.base import Environment

__all__ = ["make"]


def make(config: dict[str, Any]) -> Environment:
    """Make the environment in its process, from the JSON of its configuration (ConfigError where it cannot be)."""
    import msgspec  # noqa: PLC0415 - who names this package alone needs none of it

    from hpcrl.config.environments import ReasoningGymEnv  # noqa: PLC0415
    from hpcrl.rollouts.environments.gym.environment import ReasoningGymEnvironment  # noqa: PLC0415

    return ReasoningGymEnvironment(ReasoningGymEnv.model_validate_json(msgspec.json.encode(config)))
