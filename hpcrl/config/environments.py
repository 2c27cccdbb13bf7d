"""Environments of a recipe: where rollouts come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hpcrl.config.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    StrictModel,
)

__all__ = [
    "CalculatorEnv",
    "CustomEnv",
    "EnvironmentConfig",
    "LatencyConfig",
    "WordsEnv",
]


class LatencyConfig(StrictModel):
    """Extra waiting time of a rollout, as a slow tool or test suite would cause; for measurements."""

    median_s: NonNegativeFloat = 0.0
    """Waiting time of an ordinary rollout in seconds."""
    tail_share: Fraction = 0.0
    """Share of rollouts that take longer."""
    tail_factor: PositiveFloat = 10.0
    """How many times longer these take."""


class _Environment(StrictModel):
    name: Name
    """Name in metrics; unique in the recipe."""
    weight: PositiveFloat = 1.0
    """Share of this environment in the prompts, relative to the others."""
    latency: LatencyConfig = LatencyConfig()
    """Extra waiting time, for measurements."""


class WordsEnv(_Environment):
    """Single turn: transform an English word letter by letter."""

    kind: Literal["words"]
    task: Literal["reverse", "sort", "shift"] = "reverse"
    """``reverse`` the letters, ``sort`` them, or ``shift`` each by one in the alphabet."""
    min_letters: PositiveInt = 3
    """Shortest word."""
    max_letters: PositiveInt = 6
    """Longest word."""


class CalculatorEnv(_Environment):
    """Several turns: answer an arithmetic question with a tool that runs a program in a sandboxed process."""

    kind: Literal["calculator"]
    max_operand: PositiveInt = 99
    """Largest number in a question."""
    max_turns: PositiveInt = 3
    """Model turns before the rollout is ended."""
    tool_timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one tool call in seconds."""


class CustomEnv(_Environment):
    """An environment of your own. It runs in a process of its own."""

    kind: Literal["custom"]
    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``package.module:Name`` of a callable that returns an `hpcrl.rollouts.environments.Environment`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""
    try_before_submit: bool = True
    """``hpcrl recipe check`` and ``submit`` import and make it, too. ``false`` where it needs what only nodes have."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest time for importing its module and calling the factory in seconds."""
    answer_timeout_s: PositiveFloat = 120.0
    """Longest time in seconds for a prompt, and for which the event loop of its process may be blocked: then it is
    ended and started again."""
    turn_timeout_s: PositiveFloat = 3600.0
    """Longest time of its own (tools, tests, judging) between two replies of the policy in seconds; a rollout that
    takes longer is dropped."""


EnvironmentConfig = Annotated[WordsEnv | CalculatorEnv | CustomEnv, Field(discriminator="kind")]
