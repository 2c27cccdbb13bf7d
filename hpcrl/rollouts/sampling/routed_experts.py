"""Which experts engines chose for the tokens of a conversation: asked for once a token, kept in order.

An engine makes a row for each token that goes into its model. The last sampled token has not gone in when the answer
is there, so its row is missing until the next turn, whose prompt begins with it, and for ever at the end of a rollout.
A turn asks for rows from where there are none yet (``routed_experts_prompt_start``): those of earlier tokens are known
from the engine that computed them first, with the weights of that time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import RoutedExperts, exact_dtype
from hpcrl.models import load_facts
from hpcrl.rollouts.engines.limits import AnswerLimits
from hpcrl.rollouts.sampling.known_rows import Block, KnownRows, Name, Tokens

__all__ = ["Examined", "RoutedExpertsRows", "RoutedExpertsSettings", "answer_limits"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedExpertsSettings:
    """What is to be known of routes.

    Attributes
    ----------
    layers, width, experts:
        Of the model: all its layers, experts of a token, and experts to choose from.
    gaps:
        Whether KV may come to an engine that did not compute it (pool, host, prefill): rows that are zero in all layers
        are unknown there (`hpcrl.inference.vllm.experts`).
    keep:
        False where nobody wants to know (evaluations): as little as possible is asked for.
    """

    layers: int
    width: int
    experts: int
    gaps: bool = False
    keep: bool = True

    @classmethod
    def of(cls, recipe: Recipe) -> RoutedExpertsSettings | None:
        """None where engines do not return experts (FileNotFoundError, ValueError: the model is not known)."""
        if not recipe.returns_routed_experts:
            return None
        facts = load_facts(recipe.model.path)
        return cls(len(facts.layers), facts.num_experts_per_tok, facts.num_experts, gaps=recipe.engine.fetches_kv)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that is exact for the model's number of experts."""
        return exact_dtype(self.experts)

    @property
    def token_bytes(self) -> int:
        """Of the row of a token."""
        return self.layers * self.width * self.dtype.itemsize

    def unkept(self) -> RoutedExpertsSettings:
        """The same for who does not want to know."""
        return replace(self, keep=False)

    def checked(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of an engine in `dtype`, whatever width its version counts experts in.

        Raises
        ------
        ValueError
            They are not of this model: other layers, other experts a token, or an expert that it does not have.
        """
        AnswerLimits(routes=(self.layers, self.width, self.experts)).check_rows(rows)
        return rows if rows.dtype == self.dtype else rows.astype(self.dtype)

    def examined(self, rows: NDArray[Any]) -> Examined:
        """Rows of an engine, and which of them are known (ValueError as `checked`)."""
        rows = self.checked(rows)
        if not self.gaps:
            return Examined(rows, np.ones(len(rows), np.bool_))
        return Examined(rows, rows.reshape(len(rows), -1).max(axis=1, initial=0) > 0)


class Examined(NamedTuple):
    """Rows of an answer that fit the model.

    Attributes
    ----------
    rows:
        ``[T, layers, experts_per_token]`` in the dtype of the settings.
    known:
        ``[T]``: whether an engine said which experts they are.
    """

    rows: NDArray[Any]
    known: NDArray[np.bool_]


Opening = tuple[int, Tokens]
"""Salt and tokens of a first prompt."""


class Answered(NamedTuple):
    """Rows of an answer, and of its opening what others may need.

    Attributes
    ----------
    opening:
        None where it is nobody's but this conversation's.
    blocks:
        Of the opening, as the store takes them.
    """

    examined: Examined
    opening: Opening | None
    blocks: list[Block]


class Assembled(NamedTuple):
    """All rows of a conversation.

    Attributes
    ----------
    experts, present:
        ``[T, layers, experts_per_token]``, and ``[T]``: whether a row is known.
    answered:
        Rows that its own answers had.
    filled:
        Blocks of the store that had others, each with how many.
    """

    experts: NDArray[Any]
    present: NDArray[np.bool_]
    answered: int
    filled: list[tuple[Name, int]]


class RoutedExpertsRows:
    """Rows of one conversation, as they come.

    What goes through all of them (`examined`, `assembled`) changes nothing that others see, so that a thread may do it.
    The rest belongs to the event loop, as the store does.
    """

    def __init__(self, settings: RoutedExpertsSettings, store: KnownRows | None = None) -> None:
        """Begin. ``store`` has rows of prompts from other conversations, and takes those of this one."""
        self._settings, self._store = settings, store
        self._pieces: list[tuple[int, Examined]] = []
        self._end = 0
        self._opening: Opening | None = None

    def start(self, prompt_length: int) -> int:
        """First token of a prompt whose row is wanted. Every engine computes the last one, so that is the least."""
        last = prompt_length - 1
        return min(self._end, last) if self._settings.keep else last

    def add(self, end: int, rows: NDArray[Any], *, opening: Opening | None = None) -> None:
        """Examine rows, and `take` them (ValueError: they are not of the model)."""
        if self.wants_rows:
            self.take(end, self.examined(rows, opening))

    def examined(self, rows: NDArray[Any], opening: Opening | None) -> Answered:
        """What `take` is to be given (ValueError: they are not of the model).

        Parameters
        ----------
        opening:
            Salt and tokens of the first prompt, where rows begin with it and others may share them.
        """
        examined = self._settings.examined(rows)
        if opening is None or self._store is None or not self._settings.gaps:
            return Answered(examined, None, [])
        return Answered(examined, opening, self._store.blocks_of(*opening, *examined))

    @property
    def wants_rows(self) -> bool:
        """False where nobody wants to know."""
        return self._settings.keep

    def take(self, end: int, answered: Answered) -> None:
        """Rows of the tokens before token ``end``, in order.

        Where an answer's last ones are unknown, which every engine computes itself, it has lost them: the next turn
        asks for them again, of whoever computes these tokens anew.
        """
        start = end - len(answered.examined.rows)
        self._pieces.append((start, answered.examined))
        self._end = start + _known_until(answered.examined.known)
        if answered.opening is not None and self._store is not None:
            self._opening = answered.opening
            self._store.keep(answered.opening[0], answered.blocks)

    @property
    def nbytes(self) -> int:
        """Of all rows that are there."""
        return sum(examined.rows.nbytes for _, examined in self._pieces)

    def aligned(self, tokens: int) -> RoutedExperts | None:
        """What is `assembled`, and `settled`, in one call: for a few rows, beside no event loop."""
        assembled = self.assembled(tokens)
        return None if assembled is None else self.settled(assembled)

    def assembled(self, tokens: int) -> Assembled | None:
        """What engines said of the first ``tokens`` tokens, one row a token, and the store has of the opening.

        None where engines said nothing.
        """
        if not self._pieces:
            if self._store is not None and self._settings.keep:
                self._store.counters.rows_unknown += tokens - 1
            return None
        experts = np.zeros((tokens, self._settings.layers, self._settings.width), self._settings.dtype)
        present = np.zeros(tokens, np.bool_)
        for start, (rows, known) in self._pieces:
            experts[start : start + len(rows)] = rows
            present[start : start + len(rows)] = known
        answered = int(present.sum())
        filled = []
        if self._store is not None and self._opening is not None:
            filled = self._store.fill(*self._opening, experts, present)
        return Assembled(experts, present, answered, filled)

    def settled(self, assembled: Assembled) -> RoutedExperts:
        """The same; sources are counted, and the use of what others have said is noted."""
        experts, present, answered, filled = assembled
        if self._store is not None:
            self._store.used(name for name, _ in filled)
            shared = sum(count for _, count in filled)
            counters = self._store.counters
            counters.rows_answer += answered
            counters.rows_shared_prefix += shared
            counters.rows_unknown += len(present) - 1 - answered - shared
        return RoutedExperts.of(experts, present.view(np.uint8))


def _known_until(known: NDArray[np.bool_]) -> int:
    """How many rows there are up to the last known one."""
    return len(known) - int(known[::-1].argmax()) if known.any() else 0


def answer_limits(recipe: Recipe, routes: RoutedExpertsSettings | None) -> AnswerLimits:
    """Return the bounds of answers of the recipe's engines; those of a model that is not known are wider."""
    experts = None if routes is None else (routes.layers, routes.width, routes.experts)
    try:
        vocab_size = load_facts(recipe.model.path).vocab_size
    except (FileNotFoundError, ValueError) as error:
        _log.warning("the vocabulary is not known, so tokens of engines are not compared with it: %s", error)
        return AnswerLimits(routes=experts)
    return AnswerLimits(vocab_size=vocab_size, routes=experts)
