"""From a recipe's ``environments`` to environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcrl.config.recipe import CalculatorEnv, EnvironmentConfig, HostedEnv, Recipe, WordsEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.base import Environment
from hpcrl.rollouts.environments.calculator import CalculatorEnvironment
from hpcrl.rollouts.environments.hosted import HostedEnvironment
from hpcrl.rollouts.environments.latency import DelayedEnvironment
from hpcrl.rollouts.environments.words import WordsEnvironment

__all__ = ["build_environments", "hosted"]


def build_environments(
    recipe: Recipe, *, on_lost: Callable[[str, str], None] = lambda name, why: None
) -> tuple[Environment, ...]:
    """The environments of ``recipe``, in its order; those of one's own start their processes.

    Parameters
    ----------
    on_lost:
        Told of a process that died or hung (see `HostedEnvironment`).

    Raises
    ------
    ConfigError
        With every environment that cannot be built.
    """
    environments: list[Environment] = []
    findings: list[Finding] = []
    for config in recipe.environments:
        try:
            environments.append(_build(config, on_lost))
        except ConfigError as error:
            findings += error.findings
    if findings:
        for environment in hosted(environments):
            environment.close()
        raise ConfigError(findings)
    return tuple(environments)


def _build(config: EnvironmentConfig, on_lost: Callable[[str, str], None]) -> Environment:
    match config:
        case WordsEnv():
            environment: Environment = WordsEnvironment(config)
        case CalculatorEnv():
            environment = CalculatorEnvironment(config)
        case HostedEnv():
            environment = HostedEnvironment(config, on_lost=on_lost)
    if config.latency.median_s > 0 or isinstance(config, HostedEnv):
        # an environment of one's own may call itself as it likes; metrics use the recipe's name
        return DelayedEnvironment(environment, name=config.name, latency=config.latency)
    return environment


def hosted(environments: Sequence[Environment]) -> list[HostedEnvironment]:
    """Give the environments that have a process, which must be closed."""
    inner = [each.inner if isinstance(each, DelayedEnvironment) else each for each in environments]
    return [each for each in inner if isinstance(each, HostedEnvironment)]
