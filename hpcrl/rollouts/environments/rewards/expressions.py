"""Mathematical expressions, compared by ``math-verify``, which uses sympy. Both may take unbounded time or memory."""

from __future__ import annotations

import logging
import re
from itertools import product
from typing import Any

from hpcrl.config.rewards import MathReward
from hpcrl.installing import install_command
from hpcrl.rollouts.environments.rewards.extraction import extract
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError
from hpcrl.rollouts.environments.rewards.numbers import without_thousands

_MARKS = ("$", "\\(", "\\[", "\\boxed")
"""Strings that introduce LaTeX in a text."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,4}\{")
_WITH_UNIT = re.compile(r"([-+]?[\d,.]*\d)\s+[A-Za-z]{2,}[A-Za-z .]*")
"""A number and words, which LaTeX takes for a product of letters."""


class MathCheck:
    """Compares expressions."""

    def __init__(self, config: MathReward) -> None:
        try:
            import math_verify  # noqa: PLC0415 - an extra, and a second of imports
        except ImportError as error:
            what = f"expressions are compared by the Python module 'math_verify', which cannot be imported ({error})"
            raise CheckerNotMadeError(what, install_command("rewards")) from None
        # the library would warn once per process that its own timeouts are off
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self._config, self._library = config, math_verify
        self._answer, self._truth = "", list[Any]()

    def answer_problem(self, answer: str) -> str:
        truth = extract(answer, self._config.extract_answer)
        if truth is None:
            return f"has no part {self._config.extract_answer!r}"
        # an expression that stays text was not parsed, and would be compared literally
        return "" if any(not isinstance(each, str) for each in self._parsed_answer(truth)) else "is not an expression"

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply (see `hpcrl.rollouts.environments.rewards.slow.SlowCheck`)."""
        said, truth = extract(reply, self._config.extract), extract(answer, self._config.extract_answer)
        if said is None:
            return 0.0
        if answer != self._answer:
            # the rollouts of a group come one after the other
            self._answer, self._truth = answer, self._parsed_answer(truth or "")
        if not self._truth:
            raise ValueError(f"the answer {answer[:80]!r} is not an expression")
        return float(self._equal(self._truth, self._parsed_reply(said)))

    def _parsed_reply(self, text: str) -> list[Any]:
        """Parse what was extracted of a reply."""
        if self._config.extract in ("all", "last_line"):
            return self._parsed(text)  # the library looks for expressions in a text
        # what is marked is an expression as the answer is, also without signs of LaTeX around it
        found = self._parsed_answer(text)
        number = _WITH_UNIT.fullmatch(text)
        return found if number is None else [*self._parsed(number[1]), *found]

    def _parsed_answer(self, text: str) -> list[Any]:
        return self._parsed(text if any(mark in text for mark in _MARKS) else f"${text}$") or self._parsed(text)

    def _parsed(self, text: str) -> list[Any]:
        """Parse a text: each reading of it, and the text itself where there is one."""
        # the library reads 1\,000 and 1 000 as the product of 1 and 0, and boxes only as \boxed{
        text = _BOX.sub(r"\\boxed{", without_thousands(text))
        # the library's own timeout would count as a wrong answer; the process has a deadline instead
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
