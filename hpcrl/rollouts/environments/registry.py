"""From a recipe's ``environments`` to environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hpcrl.config.recipe import CalculatorEnv, EnvironmentConfig, HostedEnv, Recipe, WordsEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.base import Environment
from hpcrl.rollouts.environments.calculator import CalculatorEnvironment
from hpcrl.rollouts.environments.hosted import HostedEnvironment
from hpcrl.rollouts.environments.latency import DelayedEnvironment
from hpcrl.rollouts.environments.words import WordsEnvironment

if TYPE_CHECKING:
    from hpcrl.rollouts.environments.workers.remote_environment import EnvironmentWorkers


def build_environments(
    recipe: Recipe,
    *,
    on_lost: Callable[[str, str], None] = lambda name, why: None,
    workers: EnvironmentWorkers | None = None,
) -> tuple[Environment, ...]:
    """Return the environments of ``recipe``, in its order; those with their own process are started.

    Parameters
    ----------
    on_lost:
        Called with the name and the reason when a process died or hung (see `HostedEnvironment`).
    workers:
        Workers that host all of them; None: they are made here.

    Raises
    ------
    ConfigError
        Names every environment that cannot be built.
    """
    environments: list[Environment] = []
    findings: list[Finding] = []
    for config in recipe.environments:
        try:
            environments.append(_build(config, on_lost) if workers is None else _remote(config, workers))
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
        # a custom environment may have any name of its own; metrics use the recipe's name
        return DelayedEnvironment(environment, name=config.name, latency=config.latency)
    return environment


def _remote(config: EnvironmentConfig, workers: EnvironmentWorkers) -> Environment:
    # processes of environments import this package, too, and start sooner without the HTTP client
    from hpcrl.rollouts.environments.workers.hosted_kinds import hosted_config  # noqa: PLC0415
    from hpcrl.rollouts.environments.workers.remote_environment import RemoteEnvironment  # noqa: PLC0415

    environment = RemoteEnvironment(hosted_config(config), workers)
    return DelayedEnvironment(environment, name=config.name, latency=config.latency)


def hosted(environments: Sequence[Environment]) -> list[HostedEnvironment]:
    """Return the environments that have a process, which must be closed."""
    inner = [each.inner if isinstance(each, DelayedEnvironment) else each for each in environments]
    return [each for each in inner if isinstance(each, HostedEnvironment)]
