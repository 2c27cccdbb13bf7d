"""From a recipe's ``environments`` to environments."""

from __future__ import annotations

import importlib
from typing import cast

from hpcrl.config.recipe import CalculatorEnv, CustomEnv, EnvironmentConfig, Recipe, WordsEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.base import Environment
from hpcrl.rollouts.environments.calculator import CalculatorEnvironment
from hpcrl.rollouts.environments.latency import DelayedEnvironment
from hpcrl.rollouts.environments.words import WordsEnvironment

__all__ = ["build_environments"]


def build_environments(recipe: Recipe) -> tuple[Environment, ...]:
    """The environments of ``recipe``, in its order.

    Raises
    ------
    ConfigError
        With every environment that cannot be built.
    """
    environments: list[Environment] = []
    findings: list[Finding] = []
    for config in recipe.environments:
        try:
            environments.append(_build(config))
        except ConfigError as error:
            findings += error.findings
    if findings:
        raise ConfigError(findings)
    return tuple(environments)


def _build(config: EnvironmentConfig) -> Environment:
    match config:
        case WordsEnv():
            environment: Environment = WordsEnvironment(config)
        case CalculatorEnv():
            environment = CalculatorEnvironment(config)
        case CustomEnv():
            environment = _build_custom(config)
    if config.latency.median_s > 0 or isinstance(config, CustomEnv):
        # an environment of one's own may call itself as it likes; metrics use the recipe's name
        return DelayedEnvironment(environment, name=config.name, latency=config.latency)
    return environment


def _build_custom(config: CustomEnv) -> Environment:
    module_name, _, attribute = config.factory.partition(":")

    def refuse(what: str, way_out: str = "") -> ConfigError:
        return ConfigError([Finding("recipe", f"environments.{config.name}.factory", what, way_out)])

    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        way_out = "install it, or add its directory to PYTHONPATH"
        raise refuse(f"module {module_name!r} cannot be imported: {error}", way_out) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise refuse(f"{module_name!r} has no callable {attribute!r}")
    try:
        environment = factory(**config.args)
    except Exception as error:
        raise refuse(f"{config.factory}(**args) raised {type(error).__name__}: {error}", "check args") from error
    missing = [
        name for name in ("prompt", "rollout", "demonstration") if not callable(getattr(environment, name, None))
    ]
    if missing:
        way_out = "see hpcrl.rollouts.environments.Environment"
        raise refuse(f"{config.factory} gave no environment: it lacks {', '.join(missing)}", way_out)
    return cast("Environment", environment)
