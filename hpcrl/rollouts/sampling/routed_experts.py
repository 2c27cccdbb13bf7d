"""Which experts engines chose for the tokens of a conversation: asked for once a token, kept in order.

An engine makes a row for each token that goes into its model. The last sampled token has not gone in when the answer
is there, so its row is missing until the next turn, whose prompt begins with it, and for ever at the end of a rollout.
A turn asks for rows from where there are none yet (``routed_experts_prompt_start``): those of earlier tokens are known
from the engine that computed them first, with the weights of that time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcrl.config.recipe import Recipe
from hpcrl.dock.routes import RoutedExperts, exact_dtype
from hpcrl.models import load_facts
from hpcrl.rollouts.sampling.known_rows import KnownRows, Tokens

__all__ = ["Examined", "RoutedExpertsRows", "RoutedExpertsSettings"]


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
        if rows.shape[1:] != (self.layers, self.width):
            found, own = "x".join(map(str, rows.shape[1:])), f"{self.layers}x{self.width}"
            raise ValueError(f"rows have {found} experts (layers x experts a token), the model has {own}")
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.experts:
            wrong = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise ValueError(f"expert {wrong} is none of the model's {self.experts}")
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


class RoutedExpertsRows:
    """Rows of one conversation, as they come.

    What goes through all of them (`RoutedExpertsSettings.examined`, `assembled`) reads what nobody changes meanwhile,
    so that a thread may do it. The rest belongs to the event loop, as the store does.
    """

    def __init__(self, settings: RoutedExpertsSettings, store: KnownRows | None = None) -> None:
        """Begin. ``store`` has rows of prompts from other conversations, and takes those of this one."""
        self._settings, self._store = settings, store
        self._pieces: list[tuple[int, Examined]] = []
        self._end = 0
        self._opening: tuple[int, Tokens] | None = None

    def start(self, prompt_length: int) -> int:
        """First token of a prompt whose row is wanted. Every engine computes the last one, so that is the least."""
        last = prompt_length - 1
        return min(self._end, last) if self._settings.keep else last

    def add(self, end: int, rows: NDArray[Any], *, opening: tuple[int, Tokens] | None = None) -> None:
        """Examine rows, and `take` them (ValueError: they are not of the model)."""
        if self.wants_rows:
            self.take(end, self._settings.examined(rows), opening=opening)

    @property
    def wants_rows(self) -> bool:
        """False where nobody wants to know."""
        return self._settings.keep

    def take(self, end: int, examined: Examined, *, opening: tuple[int, Tokens] | None = None) -> None:
        """Rows of the tokens before token ``end``, in order.

        Parameters
        ----------
        opening:
            Salt and tokens of the first prompt, where rows begin with it and others may share them.
        """
        self._pieces.append((end - len(examined.rows), examined))
        self._end = end
        if opening is not None and self._store is not None and self._settings.gaps:
            self._opening = opening
            salt, token_ids = opening
            self._store.add(salt, token_ids, *examined)

    @property
    def nbytes(self) -> int:
        """Of all rows that are there."""
        return sum(examined.rows.nbytes for _, examined in self._pieces)

    def aligned(self, tokens: int) -> RoutedExperts | None:
        """What is `assembled`, and `settled`, in one call: for a few rows, beside no event loop."""
        assembled = self.assembled(tokens)
        return None if assembled is None else self.settled(assembled)

    def assembled(self, tokens: int) -> Examined | None:
        """What engines said of the first ``tokens`` tokens, one row a token; None where they said nothing."""
        if not self._pieces:
            if self._store is not None and self._settings.keep:
                self._store.counters.rows_unknown += tokens - 1
            return None
        experts = np.zeros((tokens, self._settings.layers, self._settings.width), self._settings.dtype)
        present = np.zeros(tokens, np.bool_)
        for start, (rows, known) in self._pieces:
            experts[start : start + len(rows)] = rows
            present[start : start + len(rows)] = known
        return Examined(experts, present)

    def settled(self, assembled: Examined) -> RoutedExperts:
        """The same with what the store has of the opening; sources are counted."""
        experts, present = assembled
        if self._store is not None:
            answer = int(present.sum())
            filled = 0 if self._opening is None else self._store.fill(*self._opening, experts, present)
            counters = self._store.counters
            counters.rows_answer += answer
            counters.rows_shared_prefix += filled
            counters.rows_unknown += len(present) - 1 - answer - filled
        return RoutedExperts.of(experts, present.view(np.uint8))
