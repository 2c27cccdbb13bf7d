"""Judge of an environment: all checkers of its recipe, and the reward they make together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from hpcrl.config.rewards import FormatReward, GymReward, LengthReward, RewardConfig
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.environments.base import Outcome, Reply
from hpcrl.rollouts.environments.dataset.problems import shown
from hpcrl.rollouts.environments.outcomes import OutcomeError
from hpcrl.rollouts.environments.rewards.answers import quick_check
from hpcrl.rollouts.environments.rewards.processes import CheckerError, CheckerProcesses
from hpcrl.rollouts.environments.rewards.quick import LengthPenalty, QuickCheck
from hpcrl.rollouts.environments.rewards.slow import SLOW_REWARDS, SlowReward


class Judge:
    """Judges replies. The reward is the sum of scores, each times its weight, less penalties."""

    def __init__(self, name: str, rewards: Sequence[RewardConfig | GymReward], *, processes: int) -> None:
        """Make the checkers, those in processes as well.

        Parameters
        ----------
        name:
            Name of the environment.
        processes:
            Maximum processes of slow checkers.

        Raises
        ------
        ConfigError
            With each that cannot be made.
        """
        self._quick: list[tuple[str, float, QuickCheck]] = []
        self._slow: list[tuple[str, SlowReward]] = []
        self._penalties: list[tuple[str, LengthPenalty]] = []
        self._name, self._numbers = name, list[int]()
        for number, reward in enumerate(rewards):
            part = reward.name or reward.kind
            if isinstance(reward, LengthReward):
                self._penalties.append((part, LengthPenalty(reward)))
            elif isinstance(reward, SLOW_REWARDS):
                self._slow.append((part, reward))
                self._numbers.append(number)
            else:
                self._quick.append((part, reward.weight, quick_check(reward)))
        key = f"environments.{name}.rewards"
        try:
            self._processes = CheckerProcesses([reward for _, reward in self._slow], limit=processes)
        except CheckerError as error:
            raise ConfigError([Finding("recipe", key, str(error), "its log has details")]) from None
        if self._processes.problems:
            self._processes.close()
            raise ConfigError(
                [
                    Finding("recipe", f"{key}.{self._numbers[n]}", what, hint)
                    for n, what, hint in self._processes.problems
                ]
            )

    def check_answers(self, answers: Iterable[str]) -> None:
        """Check a sample of the answers of rows in processes: all would take too long.

        Raises
        ------
        ConfigError
            No reply can be compared with one of them.
        """
        for answer, (number, (name, _)) in product(answers, enumerate(self._slow)):
            try:
                problem = self._processes.answer_problem(number, answer)
            except CheckerError as error:
                problem = f"cannot be read: {error}"
            if problem:
                key = f"environments.{self._name}.rewards.{self._numbers[number]}"
                what = f"an answer of the file {problem} (for the part {name!r} of the reward): {shown(answer)}"
                raise ConfigError([Finding("recipe", key, what, "correct the row, or see columns.answer")])

    async def judge(self, reply: Reply, answer: str, row: dict[str, Any], others: Sequence[str] = ()) -> Outcome:
        """Judge a reply; of several right answers that with the highest score counts, for each checker.

        Parts: the score of each checker under its name, penalties as they are, and ``unfinished``: 1 for a reply that
        was cut at a limit.

        Raises
        ------
        CheckerError
            A checker raised, took too long, or lost its process.
        OutcomeError
            A checker gave no score.
        """
        parts: dict[str, float] = {}
        reward, earns = 0.0, True
        for name, weight, check in self._quick:
            parts[name] = max(check.score(reply, each) for each in (answer, *others))
            reward += weight * parts[name]
        for number, (name, config) in enumerate(self._slow):
            try:
                parts[name] = await self._slow_score(number, reply.text, (answer, *others), row)
            except (CheckerError, OutcomeError) as error:
                raise type(error)(f"part {name!r} of the reward: {error}") from None
            reward += config.weight * parts[name]
            if isinstance(config, FormatReward) and config.required and not parts[name]:
                earns = False
        reward = reward if earns else 0.0
        for name, penalty in self._penalties:
            parts[name] = penalty.of(reply)
            reward += parts[name]
        return Outcome(reward=reward, parts={**parts, "unfinished": float(not reply.finished)})

    async def _slow_score(self, number: int, text: str, answers: Sequence[str], row: dict[str, Any]) -> float:
        """Return the highest score; an answer that cannot be compared is an error where no other one is right."""
        best, failed = -math.inf, None
        for answer in answers:
            try:
                best = max(best, await self._processes.score(number, text, answer, row))
            except (CheckerError, OutcomeError) as error:
                failed = failed or error
                continue
            if best == 1.0 or isinstance(self._slow[number][1], FormatReward):
                return best
        if failed is not None:
            raise failed
        return best

    def close(self) -> None:
        """End its processes."""
        self._processes.close()
