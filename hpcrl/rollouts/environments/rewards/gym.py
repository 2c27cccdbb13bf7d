"""Tasks of the library ``reasoning_gym``: made from a seed, judged by their own scorers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from hpcrl.config.rewards import GymReward, GymTaskConfig
from hpcrl.installing import install_command
from hpcrl.rollouts.environments.base import Outcome
from hpcrl.rollouts.environments.outcomes import OutcomeError, checked_outcome
from hpcrl.rollouts.environments.rewards.extraction import extract
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError

GYM_BLOCK = 32
"""Number of questions of one seed."""
_KEPT_BLOCKS = 16


class GymGenerator:
    """Makes questions. Some tasks make all of a seed at once, others one at a time: few of many seeds suit both."""

    def __init__(self, tasks: Mapping[str, GymTaskConfig]) -> None:
        """Import the library, and try each task.

        Raises
        ------
        CheckerNotMadeError
            It is not there, or does not know a task or its parameters.
        """
        try:
            import reasoning_gym  # noqa: PLC0415 - an extra, and seconds of imports
            from reasoning_gym.factory import DATASETS  # noqa: PLC0415
        except ImportError as error:
            what = f"tasks are made by the Python module 'reasoning_gym', which cannot be imported ({error})"
            raise CheckerNotMadeError(what, install_command("reasoning-gym")) from None
        self._library, self._tasks = reasoning_gym, dict(tasks)
        if unknown := sorted(tasks.keys() - DATASETS.keys()):
            what = f"reasoning_gym has no task {unknown[0]!r}"
            raise CheckerNotMadeError(what, f"it has {', '.join(sorted(DATASETS))}")
        # cached, because the members of a group ask for the same question one after the other
        self._made = lru_cache(maxsize=_KEPT_BLOCKS)(self._make)
        for task, config in tasks.items():
            if wrong := sorted(config.parameters.keys() & {"seed", "size"}):
                raise CheckerNotMadeError(f"parameters of {task!r} have {wrong[0]!r}", "it follows from the recipe")
            try:
                self.entry(task, 0, 0)
            except Exception as error:
                what = f"reasoning_gym cannot make {task!r}: {type(error).__name__}: {str(error)[:200]}"
                raise CheckerNotMadeError(what, "see the configuration of that task in the library") from error

    def entry(self, task: str, seed: int, number: int) -> dict[str, Any]:
        """Return question ``number`` (below ``GYM_BLOCK``) of a seed as the library has it."""
        found: dict[str, Any] = self._made(task, seed)[number]
        return found

    def score(self, task: str, seed: int, number: int, answer: str) -> Any:
        """Return the score of the task's own scorer, which may raise any exception."""
        block = self._made(task, seed)
        return block.score_answer(answer, block[number])

    def _make(self, task: str, seed: int) -> Any:
        return self._library.create_dataset(task, seed=seed, size=GYM_BLOCK, **self._tasks[task].parameters)


class GymCheck:
    """Asks the scorer of a task. The row of a question names it: ``task``, ``seed`` and ``number``."""

    def __init__(self, config: GymReward) -> None:
        self._config, self._generator = config, GymGenerator(config.tasks)

    def answer_problem(self, answer: str) -> str:
        """See `hpcrl.rollouts.environments.rewards.slow.SlowCheck`."""
        return ""

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply (see `hpcrl.rollouts.environments.rewards.slow.SlowCheck`)."""
        said = extract(reply, self._config.extract)
        if said is None:
            return 0.0
        try:
            value = self._generator.score(row["task"], row["seed"], row["number"], said)
        except Exception:
            if self._config.scorer_errors == "zero":
                return 0.0
            raise
        score = checked_outcome(Outcome(reward=value)).reward
        if not 0 <= score <= 1:
            raise OutcomeError(f"its score is {score:g}, which is not from 0 to 1")
        return score
