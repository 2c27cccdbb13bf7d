"""Demonstrations of environments as packed token batches for supervised training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.models.tokenizer import ChatTokenizer, Message
from hpcrl.rollouts.environments import Environment
from hpcrl.trainer.supervised.masks import ConversationRenderer

_MAX_KEPT = 10_000
"""Maximum rendered demonstrations that are kept."""


def render_demonstration(
    tokenizer: ChatTokenizer, messages: Sequence[Message], ends: frozenset[int] = frozenset()
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and which of them are the assistant's (its end tokens included).

    The ids are those that a rollout of the same conversation has: each turn of the assistant lies between the
    rendering of what came before it, with the generation prompt, and its end token.

    Parameters
    ----------
    ends:
        Tokens that end a turn, in addition to the ``eos_token``.

    Returns
    -------
    tuple
        Ids and flags, cut after the last turn of the assistant.

    Raises
    ------
    ValueError
        No message is the assistant's, or the template or tokenizer does not render a conversation as an
        extension of its beginning.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("a demonstration needs a message of the assistant")
    sequences = _renderer_of(tokenizer, ends).render(messages)
    if len(sequences) > 1:
        raise ValueError("the chat template does not render a conversation as an extension of its beginning")
    return sequences[0].ids, sequences[0].said


@lru_cache(maxsize=1)
def _renderer_of(tokenizer: ChatTokenizer, ends: frozenset[int]) -> ConversationRenderer:
    """Return one renderer for all demonstrations: it gets quicker with what it learns of the tokenizer."""
    return ConversationRenderer(tokenizer, ends=ends)


class DemonstrationBatch(NamedTuple):
    """Packed demonstrations; ``T`` tokens, of which ``N`` are learned.

    Attributes
    ----------
    input_ids:
        ``[T]`` int64.
    attention:
        Knows positions and boundaries.
    select:
        ``[N]`` int64: the tokens before the learned ones.
    targets:
        ``[N]`` int64: the learned tokens.
    """

    input_ids: Tensor
    attention: PackedAttention
    select: Tensor
    targets: Tensor


class DemonstrationSource:
    """An endless stream of demonstrations, environments mixed by weight."""

    def __init__(
        self,
        environments: Sequence[Environment],
        weights: Sequence[float],
        tokenizer: ChatTokenizer,
        *,
        correct_share: float,
        seed: int,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """Begin; equal arguments give equal streams.

        Parameters
        ----------
        weights:
            Relative share of each environment.
        correct_share:
            Probability that a demonstration is right; otherwise it is wrong in a plausible way.
        ends:
            Tokens that end a turn, in addition to the ``eos_token``.
        """
        self._environments, self._weights, self._tokenizer = tuple(environments), tuple(weights), tokenizer
        self._correct_share, self._ends = correct_share, ends
        self._rng = random.Random(f"demonstrations {seed}")
        self._next_index = [0] * len(self._environments)
        # a template takes milliseconds, and environments with few tasks say the same again
        self._rendered: dict[str, tuple[list[int], list[bool]]] = {}

    def batch(self, size: int) -> DemonstrationBatch:
        """Return the next ``size`` demonstrations (ValueError if one cannot be rendered)."""
        ids: list[int] = []
        said: list[bool] = []
        starts = [0]
        for _ in range(size):
            one, flags = self._render(self._draw())
            ids += one
            said += flags
            starts.append(len(ids))
        input_ids = torch.tensor(ids)
        where = torch.tensor(said).nonzero()[:, 0]
        return DemonstrationBatch(input_ids, PackedAttention(torch.tensor(starts)), where - 1, input_ids[where])

    def _render(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        key = repr(messages)
        found = self._rendered.get(key)
        if found is None:
            if len(self._rendered) == _MAX_KEPT:
                self._rendered.clear()
            found = self._rendered[key] = render_demonstration(self._tokenizer, messages, self._ends)
        return found

    def _draw(self) -> Sequence[Message]:
        (which,) = self._rng.choices(range(len(self._environments)), self._weights)
        environment, index = self._environments[which], self._next_index[which]
        self._next_index[which] += 1
        correct = self._rng.random() < self._correct_share
        return environment.demonstration(environment.prompt("train", index), correct=correct, rng=self._rng)
