"""Environments of the library verifiers, which runs in an interpreter of its own."""

from typing import Any

from hpcrl.rollouts.environments.base import Environment

__all__ = ["make"]


def make(config: dict[str, Any]) -> Environment:
    """Make the environment in its process, from the JSON of its configuration (ConfigError where it cannot be)."""
    import msgspec  # noqa: PLC0415 - who names this package alone needs none of it

    from hpcrl.config.verifiers_environment import VerifiersEnv  # noqa: PLC0415
    from hpcrl.rollouts.environments.verifiers.environment import VerifiersEnvironment  # noqa: PLC0415

    return VerifiersEnvironment(VerifiersEnv.model_validate_json(msgspec.json.encode(config)))
