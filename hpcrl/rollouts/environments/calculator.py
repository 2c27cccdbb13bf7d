"""Calculator: several turns with a tool that runs a program in a sandboxed process.

::

    user:      47*83+5
    assistant: run 47*83+5
    tool:      3906
    assistant: answer 3906

Each turn of the model is one of two commands. ``run`` gives a program to the tool (`sandbox`), ``answer`` ends
the rollout. Guessing the number is mostly wrong, so what reinforcement learning finds is the tool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from hpcrl.config.recipe import CalculatorEnv
from hpcrl.errors import ConfigError, Finding
from hpcrl.rollouts.core.seeding import stable_hash
from hpcrl.rollouts.environments.base import Message, Outcome, Policy, Prompt, Split
from hpcrl.rollouts.environments.sandbox import ProgramError, ProgramRunner

_HELDOUT_ONE_IN = 8
_RUN, _ANSWER = "run ", "answer "
_MAX_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Question:
    """``a*b``, ``a*b+c`` or ``a*b-c``, and its value."""

    text: str
    value: int


class CalculatorEnvironment:
    """Multi-turn tool tasks. The reward is 1 for the right answer and 0 otherwise."""

    def __init__(self, config: CalculatorEnv) -> None:
        """Prepare the sandbox; nothing is started.

        Raises
        ------
        ConfigError
            ``max_operand`` leaves too few questions for two disjoint sets.
        """
        self.name, self._max_turns = config.name, config.max_turns
        # small factors would make guesses right too often
        self._operands = (max(1, (config.max_operand + 1) // 10), config.max_operand)
        self._sandbox = ProgramRunner(timeout_s=config.tool_timeout_s)
        try:
            self.prompt("train", 0)
            self.prompt("heldout", 0)
        except ValueError as error:
            key = f"environments.{config.name}.max_operand"
            raise ConfigError([Finding("recipe", key, str(error), "set it to 9 or more")]) from error

    def prompt(self, split: Split, index: int) -> Prompt:
        question = self._question(split, index)
        message = {"role": "user", "content": question.text}
        return Prompt(split=split, index=index, messages=(message,), data=question)

    def _question(self, split: Split, index: int) -> Question:
        for draw in range(_MAX_DRAWS):
            rng = random.Random(stable_hash("calculator", index, draw))
            a, b, c = (rng.randint(*self._operands) for _ in range(3))
            sign = rng.choice(("", "+", "-"))
            text = f"{a}*{b}{sign}{c}" if sign else f"{a}*{b}"
            # the set is decided by the question, not by the index: the two sets cannot meet
            heldout = stable_hash("split", text) % _HELDOUT_ONE_IN == 0
            if heldout == (split == "heldout"):
                return Question(text, a * b + {"": 0, "+": c, "-": -c}[sign])
        raise ValueError(f"no {split} question with operands from {self._operands[0]} to {self._operands[1]}")

    async def rollout(self, prompt: Prompt, policy: Policy) -> Outcome:
        messages: Sequence[Message] = prompt.messages
        calls = errors = 0
        answer = ""
        for turn in count(1):
            reply = await policy.reply(messages)
            text = reply.text.strip()
            if not reply.finished or not text.startswith(_RUN):
                answer = text.removeprefix(_ANSWER) if text.startswith(_ANSWER) else ""
                break
            if turn == self._max_turns:
                break  # no turn is left in which a result could be used
            calls += 1
            try:
                result = await self._sandbox.run(text.removeprefix(_RUN).strip())
            except ProgramError:
                errors, result = errors + 1, "error"
            messages = ({"role": "tool", "content": result},)
        correct = float(answer == str(prompt.data.value))
        parts = {"correct": correct, "tool": float(calls > 0), "tool_errors": float(errors)}
        return Outcome(reward=correct, parts=parts)

    def demonstration(self, prompt: Prompt, *, correct: bool, rng: random.Random) -> Sequence[Message]:
        """Return a demonstration: the tool's result, or a guess of the right magnitude without the tool."""
        question = prompt.data
        if correct:
            return (
                *prompt.messages,
                {"role": "assistant", "content": f"{_RUN}{question.text}"},
                {"role": "tool", "content": str(question.value)},
                {"role": "assistant", "content": f"{_ANSWER}{question.value}"},
            )
        span = max(2, abs(question.value) // 2)
        guess = question.value + rng.choice((-1, 1)) * rng.randint(1, span)
        return (*prompt.messages, {"role": "assistant", "content": f"{_ANSWER}{guess}"})
