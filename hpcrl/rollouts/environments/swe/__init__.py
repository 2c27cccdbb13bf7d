"""Software-engineering tasks: a repository, a shell and an editor, and a judge that runs tests."""

from typing import Any

from hpcrl.rollouts.environments.base import Environment

__all__ = ["make"]


def make(config: dict[str, Any]) -> Environment:
    """Make the environment in its process, from the JSON of its configuration (ConfigError where it cannot be)."""
    import msgspec  # noqa: PLC0415 - who names this package alone needs none of it

    from hpcrl.config.environments import SweEnv  # noqa: PLC0415
    from hpcrl.rollouts.environments.swe.environment import SweEnvironment  # noqa: PLC0415

    return SweEnvironment(SweEnv.model_validate_json(msgspec.json.encode(config)))
