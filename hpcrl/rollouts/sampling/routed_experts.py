"""Routed experts of the tokens of a conversation: requested once per token, kept in order.

An engine makes a row for each token that goes into its model. The last sampled token has not been processed when the
answer arrives. So its row is missing until the next turn, whose prompt contains it, and permanently at the end of a
rollout. A turn requests rows from the first missing one on (``routed_experts_prompt_start``): those of earlier tokens
are known from the engine that computed them first, with the weights of that time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import RoutedExperts, exact_dtype
from hpcrl.models import load_facts
from hpcrl.rollouts.engines.limits import AnswerLimits
from hpcrl.rollouts.sampling.known_rows import Block, KnownRows, Name, Tokens

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedExpertsSettings:
    """Settings for collecting routed experts.

    Attributes
    ----------
    layers, width, experts:
        All layers of the model, experts per token, and experts to choose from.
    gaps:
        An engine may receive KV that it did not compute (pool, host, prefill): rows that are zero in all layers are
        unknown there (`hpcrl.inference.vllm.experts`).
    keep:
        False where routed experts are not used (evaluations): as few as possible are requested.
    """

    layers: int
    width: int
    experts: int
    gaps: bool = False
    keep: bool = True

    @classmethod
    def of(cls, recipe: Recipe) -> RoutedExpertsSettings | None:
        """Return the settings; None where engines do not return experts.

        Raises
        ------
        FileNotFoundError, ValueError
            The model is unknown.
        """
        if not recipe.returns_routed_experts:
            return None
        facts = load_facts(recipe.model.path)
        return cls(len(facts.layers), facts.num_experts_per_tok, facts.num_experts, gaps=recipe.engine.fetches_kv)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest dtype that is exact for the model's number of experts."""
        return exact_dtype(self.experts)

    @property
    def token_bytes(self) -> int:
        """Return the size of the row of one token in bytes."""
        return self.layers * self.width * self.dtype.itemsize

    def unkept(self) -> RoutedExpertsSettings:
        """Return these settings for rollouts whose routed experts are not used."""
        return replace(self, keep=False)

    def checked(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows of an engine in `dtype`, whatever the width of its integers.

        Raises
        ------
        ValueError
            They are not of this model: other layers, other experts a token, or an expert that it does not have.
        """
        AnswerLimits(routes=(self.layers, self.width, self.experts)).check_rows(rows)
        return rows if rows.dtype == self.dtype else rows.astype(self.dtype)

    def examined(self, rows: NDArray[Any]) -> Examined:
        """Return the rows of an engine, and which of them are known (ValueError as in `checked`)."""
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
        ``[T]``: whether an engine returned the experts.
    """

    rows: NDArray[Any]
    known: NDArray[np.bool_]


Opening = tuple[int, Tokens]
"""Salt and tokens of a first prompt."""


class Answered(NamedTuple):
    """Rows of an answer, and blocks of its opening that other conversations may need.

    Attributes
    ----------
    opening:
        None where only this conversation has it.
    blocks:
        Blocks of the opening, as the store takes them.
    """

    examined: Examined
    opening: Opening | None
    blocks: list[Block]


class Assembled(NamedTuple):
    """All rows of a rollout.

    Attributes
    ----------
    experts, present:
        ``[T, layers, experts_per_token]``, and ``[T]``: whether a row is known.
    wanted:
        Rows that there could be: one a token, without shared prefixes and the last token of each sequence.
    answered:
        Those of them that its own answers had.
    filled:
        Blocks of the store that had other rows, each with the number.
    """

    experts: NDArray[Any]
    present: NDArray[np.bool_]
    wanted: int
    answered: int
    filled: list[tuple[Name, int]]


class RoutedExpertsRows:
    """Rows of one conversation, as they come.

    Methods that process all rows (`examined`, `assembled`) change no shared state, so that a thread may call them. The
    others belong to the event loop, as the store does.
    """

    def __init__(self, settings: RoutedExpertsSettings, store: KnownRows | None = None) -> None:
        """Begin. ``store`` has rows of prompts from other conversations, and takes those of this one."""
        self._settings, self._store = settings, store
        self._pieces: list[tuple[int, Examined]] = []
        self._end = 0
        self._opening: Opening | None = None

    def start(self, prompt_length: int) -> int:
        """Return the first prompt token whose row is requested; at the latest the last, which is always computed."""
        last = prompt_length - 1
        return min(self._end, last) if self._settings.keep else last

    def add(self, end: int, rows: NDArray[Any], *, opening: Opening | None = None) -> None:
        """Examine rows and `take` them (ValueError where they do not fit the model)."""
        if self.wants_rows:
            self.take(end, self.examined(rows, opening))

    def examined(self, rows: NDArray[Any], opening: Opening | None) -> Answered:
        """Return the argument for `take`.

        Parameters
        ----------
        opening:
            Salt and tokens of the first prompt, where rows begin with it and other rollouts may share them.

        Raises
        ------
        ValueError
            The rows do not fit the model.
        """
        examined = self._settings.examined(rows)
        if opening is None or self._store is None or not self._settings.gaps:
            return Answered(examined, None, [])
        return Answered(examined, opening, self._store.blocks_of(*opening, *examined))

    @property
    def wants_rows(self) -> bool:
        """Return False where routed experts are not used."""
        return self._settings.keep

    def take(self, end: int, answered: Answered) -> None:
        """Append the rows of the tokens before token ``end``, in order.

        Every engine computes the last rows of its answer itself: where these are unknown, they were lost. The next turn
        requests them again from the engine that recomputes these tokens.
        """
        start = end - len(answered.examined.rows)
        self._pieces.append((start, answered.examined))
        self._end = start + _known_until(answered.examined.known)
        if answered.opening is not None and self._store is not None:
            self._opening = answered.opening
            self._store.keep(answered.opening[0], answered.blocks)

    @property
    def nbytes(self) -> int:
        """Return the size of all collected rows in bytes."""
        return sum(examined.rows.nbytes for _, examined in self._pieces)

    def aligned(self, tokens: int) -> RoutedExperts | None:
        """Return the result of `assembled` and `settled` in one call; only for few rows or outside the event loop."""
        assembled = self.assembled(tokens)
        return None if assembled is None else self.settled(assembled)

    def assembled(self, tokens: int) -> Assembled | None:
        """Return the routed experts of the first ``tokens`` tokens, one row a token, filled up from the store.

        The store fills rows of the opening. The result is None where engines returned no rows.
        """
        return assembled([SequenceRows(self, tokens)])

    def branch(self, shared: int) -> RoutedExpertsRows:
        """Return the rows of a sequence that begins with the first ``shared`` tokens of this one, whose rows it has."""
        made = RoutedExpertsRows(self._settings, self._store)
        made._end = min(self._end, shared)
        return made

    @property
    def is_empty(self) -> bool:
        """Return whether no answer had rows."""
        return not self._pieces

    def empty(self, tokens: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return rows of ``tokens`` tokens of which nothing is known."""
        shape = (tokens, self._settings.layers, self._settings.width)
        return np.zeros(shape, self._settings.dtype), np.zeros(tokens, np.bool_)

    def put(self, experts: NDArray[Any], present: NDArray[np.bool_]) -> None:
        """Put the rows of answers into those of the whole sequence, or of its first tokens, in place."""
        for start, (rows, known) in self._pieces:
            count = max(0, min(len(rows), len(experts) - start))
            experts[start : start + count] = rows[:count]
            present[start : start + count] = known[:count]

    def fill(self, experts: NDArray[Any], present: NDArray[np.bool_]) -> list[tuple[Name, int]]:
        """Put rows of the opening from other rollouts in; return the blocks of the store, each with its row count."""
        if self._store is None or self._opening is None:
            return []
        return self._store.fill(*self._opening, experts, present)

    def count_unknown(self, tokens: int) -> None:
        """Count tokens of which no answer had a row."""
        if self._store is not None and self._settings.keep:
            self._store.counters.rows_unknown += tokens

    def settled(self, assembled: Assembled) -> RoutedExperts:
        """Return the routed experts; count the sources of rows and note the use of shared rows."""
        experts, present, wanted, answered, filled = assembled
        if self._store is not None:
            self._store.used(name for name, _ in filled)
            shared = sum(count for _, count in filled)
            counters = self._store.counters
            counters.rows_answer += answered
            counters.rows_shared_prefix += shared
            counters.rows_unknown += wanted - answered - shared
        return RoutedExperts.of(experts, present.view(np.uint8))


class SequenceRows(NamedTuple):
    """Rows of one sequence of a rollout.

    Attributes
    ----------
    tokens:
        Number of its tokens.
    parent, shared:
        Place of the sequence before this one that it shares its first ``shared`` tokens with.
    """

    rows: RoutedExpertsRows
    tokens: int
    parent: int = -1
    shared: int = 0


def assembled(sequences: Sequence[SequenceRows]) -> Assembled | None:
    """Assemble the rows of all sequences of a rollout, one behind the other; None where engines returned none.

    Those of a shared prefix are copied from the sequence that had it first, and what is unknown there stays unknown.
    """
    first, total = sequences[0].rows, sum(each.tokens for each in sequences)
    wanted = sum(each.tokens - each.shared - 1 for each in sequences)
    if all(each.rows.is_empty for each in sequences):
        first.count_unknown(wanted)
        return None
    experts, present = first.empty(total)
    starts: list[int] = []
    answered, filled, start = 0, [], 0
    for rows, tokens, parent, shared in sequences:
        whole, own = slice(start, start + tokens), slice(start + shared, start + tokens)
        if shared:
            before = slice(starts[parent], starts[parent] + shared)
            experts[start : start + shared], present[start : start + shared] = experts[before], present[before]
        rows.put(experts[whole], present[whole])
        answered += int(present[own].sum())
        filled += rows.fill(experts[whole], present[whole])
        starts.append(start)
        start += tokens
    return Assembled(experts, present, wanted, answered, filled)


def _known_until(known: NDArray[np.bool_]) -> int:
    """Return the number of rows up to the last known one."""
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
