"""Which checkers need an answer, and whether an answer of a row can be compared with anything."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcrl.config.rewards import (
    ExactReward,
    JsonSchemaReward,
    MathReward,
    NumericReward,
    RegexReward,
    RewardConfig,
)
from hpcrl.rollouts.environments.rewards.quick import ExactCheck, NumericCheck, QuickCheck

__all__ = ["AnswerCheck"]


class AnswerCheck:
    """Looks at answers of rows before there is a reply.

    Attributes
    ----------
    needed:
        A checker compares with the answer of the row.
    """

    def __init__(self, rewards: Sequence[RewardConfig]) -> None:
        self._checks: list[tuple[str, QuickCheck]] = []
        self._is_pattern = self.needed = False
        for reward in rewards:
            match reward:
                case ExactReward():
                    self._checks.append((reward.name or reward.kind, ExactCheck(reward)))
                case NumericReward():
                    self._checks.append((reward.name or reward.kind, NumericCheck(reward)))
                case RegexReward(pattern=None):
                    self._is_pattern = True
                case MathReward() | JsonSchemaReward(definition=None):
                    self.needed = True
        self.needed |= bool(self._checks) or self._is_pattern

    def problem(self, answer: str) -> str:
        """Say why an answer is of no use to a checker, as the end of a sentence; empty where it is."""
        for name, check in self._checks:
            if what := check.answer_problem(answer):
                return f"{what} (for the part {name!r} of the reward)"
        if self._is_pattern:
            try:
                re.compile(answer)
            except re.error as error:
                return f"is no regular expression: {error}"
        return ""
