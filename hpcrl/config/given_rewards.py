"""Rewards that a command is given by itself, and not in a recipe: ``--reward``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from hpcrl.config.base import StrictModel
from hpcrl.config.explain import explain_errors
from hpcrl.config.rewards import RewardConfig
from hpcrl.config.yamltree import Origins, parse_value
from hpcrl.errors import ConfigError, Finding, UsageError

_OPTION = "--reward"


class _Rewards(StrictModel):
    rewards: Annotated[tuple[RewardConfig, ...], Field(strict=False)]
    """In the order of the options."""


def parse_rewards(given: Sequence[str]) -> tuple[RewardConfig, ...]:
    """Read rewards as a command is given them.

    Parameters
    ----------
    given:
        Each the name of a checker (``numeric``), a function (``package.module:name``), or what a recipe would have in
        its place, in braces (``{kind: exact, extract: boxed}``).

    Raises
    ------
    UsageError
        One is neither.
    ConfigError
        With each setting that is wrong.
    """
    tree = {"rewards": [_tree(text) for text in given]}
    origins: Origins = {("rewards", number): f"{_OPTION} {number + 1}" for number in range(len(given))}
    try:
        rewards = _Rewards.model_validate(tree).rewards
    except ValidationError as error:
        raise ConfigError(explain_errors(_Rewards, error, origins, Path(_OPTION))) from None
    names = [reward.name or reward.kind for reward in rewards]
    if twice := [name for name in names if names.count(name) > 1]:
        what = f"two rewards are called {twice[0]!r}"
        raise ConfigError([Finding(_OPTION, "rewards", what, "name one of them: {kind: ..., name: other}")])
    return rewards


def _tree(text: str) -> dict[str, Any]:
    text = text.strip()
    if text.startswith("{"):
        with suppress(ValueError):  # the error below shows what a reward looks like
            if isinstance(value := parse_value(text), dict):
                return value
    elif ":" in text:
        return {"kind": "function", "function": text}
    elif text.isidentifier():
        return {"kind": text}
    raise UsageError(
        f"{_OPTION} {text!r} is not a reward\n"
        "    hint: give numeric, package.module:function or '{kind: exact, extract: boxed}'"
    )
