"""Checkers whose time is linear in the length of a reply: they run where the environment runs."""

from __future__ import annotations

import unicodedata
from typing import Final, Protocol

from hpcrl.config.rewards import ExactReward, LengthReward, NumericReward
from hpcrl.rollouts.environments.base import Reply
from hpcrl.rollouts.environments.rewards.extraction import extract
from hpcrl.rollouts.environments.rewards.numbers import not_one_number, number_of, same_number

_MARKED: Final = ("all", "boxed", "hashes", "answer_tag")
"""Parts of an answer that are the answer as a whole."""
_SHORT = 60
"""Maximum number of characters of an answer without a text before its number."""


class QuickCheck(Protocol):
    """Checker that computes for less than a millisecond."""

    def score(self, reply: Reply, answer: str) -> float:
        """Judge a reply: 0 to 1."""
        ...

    def answer_problem(self, answer: str) -> str:
        """Return why no reply can be compared with an answer, as the end of a sentence; empty where one can."""
        ...


class ExactCheck:
    """Compares texts after normalisation."""

    def __init__(self, config: ExactReward) -> None:
        self._config = config

    def score(self, reply: Reply, answer: str) -> float:
        said = extract(reply.text, self._config.extract)
        truth = extract(answer, self._config.extract_answer)
        return float(said is not None and truth is not None and self._normal(said) == self._normal(truth))

    def answer_problem(self, answer: str) -> str:
        truth = extract(answer, self._config.extract_answer)
        if truth is None:
            return f"has no part {self._config.extract_answer!r}"
        return "" if self._normal(truth) else "is empty after normalisation"

    def _normal(self, text: str) -> str:
        if self._config.unicode:
            text = unicodedata.normalize("NFKC", text)
        if self._config.ignore_case:
            text = text.casefold()
        if self._config.ignore_punctuation:
            text = "".join(each for each in text if not unicodedata.category(each).startswith("P"))
        return " ".join(text.split()) if self._config.collapse_whitespace else text.strip()


class NumericCheck:
    """Compares numbers."""

    def __init__(self, config: NumericReward) -> None:
        self._config = config

    def score(self, reply: Reply, answer: str) -> float:
        part = extract(reply.text, self._config.extract)
        said = None if part is None else number_of(part)
        truth = number_of(extract(answer, self._config.extract_answer) or "")
        if said is None or truth is None:
            return 0.0
        tolerances = self._config.absolute_tolerance, self._config.relative_tolerance
        return float(same_number(said, truth, absolute=tolerances[0], relative=tolerances[1]))

    def answer_problem(self, answer: str) -> str:
        part = extract(answer, self._config.extract_answer)
        if part is None:
            return f"has no part {self._config.extract_answer!r}"
        if number_of(part) is None:
            return "has no number"
        if self._config.extract_answer in _MARKED and (more := not_one_number(part)):
            return f"{more}; kind: math compares expressions"
        return ""

    def answer_note(self, answer: str) -> str:
        """Return why the last number of a short answer is not its value, as the end of a sentence."""
        answer = answer.strip()
        return "" if len(answer) > _SHORT or "\n" in answer or "####" in answer else not_one_number(answer)


class LengthPenalty:
    """Penalty on the reward of a long reply."""

    def __init__(self, config: LengthReward) -> None:
        self._config = config

    def of(self, reply: Reply) -> float:
        """Return the penalty of a reply, 0 or less; 0 where its tokens were not counted."""
        config = self._config
        tokens = config.limit_tokens is not None
        limit, length = (config.limit_tokens, reply.tokens) if tokens else (config.limit_characters, len(reply.text))
        assert limit is not None
        if length is None or length <= limit:
            return 0.0
        share = min(1.0, (length - limit) / config.rise) if config.rise else 1.0
        return -config.penalty * share
