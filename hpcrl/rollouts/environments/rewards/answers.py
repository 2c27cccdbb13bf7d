"""Checkers that need an answer, and whether the answer of a row can be compared at all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrl.config.rewards import (
    CodeReward,
    ExactReward,
    JsonSchemaReward,
    MathReward,
    NumericReward,
    RegexReward,
    RewardConfig,
    ToolCallReward,
)
from hpcrl.rollouts.environments.rewards.code_cases import CodeTestsError
from hpcrl.rollouts.environments.rewards.code_tests import read_code_tests
from hpcrl.rollouts.environments.rewards.quick import ExactCheck, NumericCheck, QuickCheck
from hpcrl.rollouts.environments.rewards.tool_calls import ToolCallCheck

_ALTERNATIVES = ("exact", "numeric", "regex", "math", "json_schema", "format", "length", "tool_call")
"""Checkers for which a row may have several right answers, or which read none."""


def quick_check(reward: ExactReward | NumericReward | ToolCallReward) -> QuickCheck:
    """Return the checker of a part of the reward."""
    match reward:
        case ExactReward():
            return ExactCheck(reward)
        case NumericReward():
            return NumericCheck(reward)
        case ToolCallReward():
            return ToolCallCheck(reward)


class AnswerCheck:
    """Looks at answers of rows before there is a reply.

    Attributes
    ----------
    needed:
        A checker compares with the answer of the row.
    alternatives:
        Every part of the reward that reads the answer can be judged for one of several answers.
    reads_calls:
        Answers are tool calls, which may stand in a column as mappings.
    """

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self._checks: list[tuple[str, QuickCheck]] = []
        self._tested = [reward for reward in rewards if isinstance(reward, CodeReward)]
        self._is_pattern = self.needed = False
        self.reads_calls = any(isinstance(reward, ToolCallReward) for reward in rewards)
        self.alternatives = all(reward.kind in _ALTERNATIVES for reward in rewards)
        for reward in rewards:
            match reward:
                case ExactReward() | NumericReward() | ToolCallReward():
                    self._checks.append((reward.name or reward.kind, quick_check(reward)))
                case RegexReward(pattern=None):
                    self._is_pattern = True
                case MathReward() | JsonSchemaReward(definition=None):
                    self.needed = True
        self.needed |= bool(self._checks) or self._is_pattern

    def problem(self, answer: str) -> str:
        """Return why an answer is unusable for a checker, as the end of a sentence; empty where it is usable."""
        for name, check in self._checks:
            if what := check.answer_problem(answer):
                return f"{what} (for the part {name!r} of the reward)"
        if self._is_pattern:
            try:
                re.compile(answer)
            except re.error as error:
                return f"is not a regular expression: {error}"
        return ""

    def note(self, answer: str) -> str:
        """Return what is odd about a usable answer, as the end of a sentence; empty where nothing is."""
        found = (check.answer_note(answer) for _, check in self._checks if isinstance(check, NumericCheck))
        return next((note for note in found if note), "")

    def tests_problem(self, values: Mapping[str, Any]) -> str:
        """Return why no program can be tested with the columns of a row, as a sentence; empty where one can."""
        for reward in self._tested:
            try:
                read_code_tests(reward, values)
            except CodeTestsError as error:
                return str(error)
        return ""
