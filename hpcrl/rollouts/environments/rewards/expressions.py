"""Mathematical expressions, compared by ``math-verify``, which asks sympy. Either may take for ever, or much memory."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

from hpcrl.config.rewards import MathReward
from hpcrl.installing import install_command
from hpcrl.rollouts.environments.rewards.extraction import extract
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError

__all__ = ["MathCheck"]

_MARKS = ("$", "\\(", "\\[", "\\boxed")
"""What LaTeX begins with in a text."""


class MathCheck:
    """Compares expressions."""

    def __init__(self, config: MathReward) -> None:
        try:
            import math_verify  # noqa: PLC0415 - an extra, and a second of imports
        except ImportError as error:
            what = f"expressions are compared by the Python module 'math_verify', which is not there ({error})"
            raise CheckerNotMadeError(what, install_command("rewards")) from None
        # it warns that its own timeouts are off, which would come once a process
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._config, self._library = config, math_verify
        self._answer, self._truth = "", list[Any]()

    def answer_problem(self, answer: str) -> str:
        truth = extract(answer, self._config.extract_answer)
        if truth is None:
            return f"has no part {self._config.extract_answer!r}"
        # what stays text was not understood, and would be compared letter by letter
        return "" if any(not isinstance(each, str) for each in self._parsed_answer(truth)) else "is no expression"

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply (see `hpcrl.rollouts.environments.rewards.slow.SlowCheck`)."""
        said, truth = extract(reply, self._config.extract), extract(answer, self._config.extract_answer)
        if said is None:
            return 0.0
        if answer != self._answer:
            # the rollouts of a group come one after the other
            self._answer, self._truth = answer, self._parsed_answer(truth or "")
        if not self._truth:
            raise ValueError(f"the answer {answer[:80]!r} is no expression")
        return float(self._equal(self._truth, self._parsed(said)))

    def _parsed_answer(self, text: str) -> list[Any]:
        return self._parsed(text if any(mark in text for mark in _MARKS) else f"${text}$") or self._parsed(text)

    def _parsed(self, text: str) -> list[Any]:
        """Parse a text: each reading of it, and the text itself where there is one."""
        # its own timeout is a signal that it turns into a wrong answer; the process has a deadline
        found: list[Any] = self._library.parse(text, parsing_timeout=None, raise_on_error=True)
        return found

    def _equal(self, truth: list[Any], said: list[Any]) -> bool:
        """Compare all readings; one that cannot be compared is an error where no other one is equal."""
        failed: Exception | None = None
        for one, other in product(truth, said):
            try:
                if self._library.verify(
                    one, other, float_rounding=self._config.digits, timeout_seconds=None, raise_on_error=True
                ):
                    return True
            except Exception as error:  # noqa: BLE001 - sympy raises errors of many kinds
                failed = error
        if failed is not None:
            raise failed
        return False
