"""Checkers that may take long, or run code of others: they run in processes that are ended at a deadline."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Protocol

from hpcrl.config.rewards import (
    CodeReward,
    FormatReward,
    FunctionReward,
    GymReward,
    JsonSchemaReward,
    MathReward,
    RegexReward,
)
from hpcrl.extend import ExtensionError, import_object
from hpcrl.processes.daemon_threads import run_process
from hpcrl.rollouts.environments.base import Outcome
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome
from hpcrl.rollouts.environments.rewards.code_check import CodeCheck
from hpcrl.rollouts.environments.rewards.documents import JsonSchemaCheck
from hpcrl.rollouts.environments.rewards.expressions import MathCheck
from hpcrl.rollouts.environments.rewards.gym import GymCheck
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError

SlowReward = RegexReward | FormatReward | FunctionReward | MathReward | JsonSchemaReward | CodeReward | GymReward
SLOW_REWARDS = (RegexReward, FormatReward, FunctionReward, MathReward, JsonSchemaReward, CodeReward, GymReward)


class SlowCheck(Protocol):
    """Checker in a process of its own."""

    def answer_problem(self, answer: str) -> str:
        """Return why no reply can be compared with an answer, as the end of a sentence; empty where one can."""
        ...

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply.

        Raises
        ------
        OutcomeError
            It gave no finite number, or one out of its range.
        Exception
            Whatever its code raises.
        """
        ...


def make_check(config: SlowReward) -> SlowCheck:
    """Make the checker of a reward (`CheckerNotMadeError` where it cannot be)."""
    return _MAKERS[type(config)](config)


class _AnyAnswer:
    """Compares with any answer."""

    def answer_problem(self, answer: str) -> str:
        return ""


class _RegexCheck(_AnyAnswer):
    """Matches somewhere."""

    def __init__(self, config: RegexReward) -> None:
        self._flags = re.IGNORECASE if config.ignore_case else 0
        self._pattern = None if config.pattern is None else re.compile(config.pattern, self._flags)

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        pattern = re.compile(answer, self._flags) if self._pattern is None else self._pattern
        return float(pattern.search(reply) is not None)


class _FormatCheck(_AnyAnswer):
    """Matches the whole."""

    def __init__(self, config: FormatReward) -> None:
        self._pattern = re.compile(config.pattern, re.DOTALL)

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        return float(self._pattern.fullmatch(reply.strip()) is not None)


class _FunctionCheck(_AnyAnswer):
    """Calls a function of the user's own."""

    def __init__(self, config: FunctionReward) -> None:
        self._config = config
        self._function = _imported(config.function)

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        value: Any = self._function(reply, answer, row, **self._config.args)
        if inspect.isawaitable(value):
            value = run_process(_wait_for(value))
        score = checked_outcome(Outcome(reward=value)).reward
        lowest, highest = self._config.lowest, self._config.highest
        if not lowest <= score <= highest:
            raise OutcomeError(f"its score is {score:g}, which is not from {lowest:g} to {highest:g}")
        return score


async def _wait_for(value: Any) -> Any:
    return await value


def _imported(name: str) -> Callable[..., Any]:
    """Import ``package.module:name`` (`CheckerNotMadeError` where it is not a function)."""
    try:
        made: Callable[..., Any] = import_object(name, called="function")
    except ExtensionError as error:
        raise CheckerNotMadeError(error.what, error.hint) from error
    return made


_MAKERS: dict[type[SlowReward], Callable[[Any], SlowCheck]] = {
    RegexReward: _RegexCheck,
    FormatReward: _FormatCheck,
    FunctionReward: _FunctionCheck,
    MathReward: MathCheck,
    JsonSchemaReward: JsonSchemaCheck,
    CodeReward: CodeCheck,
    GymReward: GymCheck,
}
