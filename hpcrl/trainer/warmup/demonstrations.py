"""Demonstrations of environments as packed token batches for supervised training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import torch
from torch import Tensor

from hpcrl.modeling.packed_attention import PackedAttention
from hpcrl.models.tokenizer import ChatTokenizer, Message
from hpcrl.rollouts.environments import Environment

__all__ = ["DemonstrationBatch", "DemonstrationSource", "render_demonstration"]


def render_demonstration(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the assistant says (its end tokens included).

    The ids are those that a rollout of the same conversation has: each turn of the assistant lies between the
    rendering of what came before it, with the generation prompt, and its end token.

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
    ids: list[int] = []
    said: list[bool] = []
    now = datetime.now()
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.render_ids(messages[:i], add_generation_prompt=True, now=now)
        after = tokenizer.render_ids(messages[: i + 1], add_generation_prompt=False, now=now)
        # templates may add a line break behind the end token; the model never says it
        while after and after[-1] != tokenizer.eos_token_id:
            after.pop()
        if before[: len(ids)] != ids or after[: len(before)] != before or len(after) == len(before):
            raise ValueError("the chat template does not render a conversation as an extension of its beginning")
        said += [False] * (len(before) - len(said)) + [True] * (len(after) - len(before))
        ids = after
    if not ids:
        raise ValueError("a demonstration needs a message of the assistant")
    return ids, said


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
    ) -> None:
        """Begin; equal arguments give equal streams.

        Parameters
        ----------
        weights:
            Relative share of each environment.
        correct_share:
            Probability that a demonstration is right; otherwise it is wrong in a plausible way.
        """
        self._environments, self._weights, self._tokenizer = tuple(environments), tuple(weights), tokenizer
        self._correct_share = correct_share
        self._rng = random.Random(f"demonstrations {seed}")
        self._next_index = [0] * len(self._environments)

    def batch(self, size: int) -> DemonstrationBatch:
        """The next ``size`` demonstrations (ValueError where one cannot be rendered)."""
        ids: list[int] = []
        said: list[bool] = []
        starts = [0]
        for _ in range(size):
            one, flags = render_demonstration(self._tokenizer, self._draw())
            ids += one
            said += flags
            starts.append(len(ids))
        input_ids = torch.tensor(ids)
        where = torch.tensor(said).nonzero()[:, 0]
        return DemonstrationBatch(input_ids, PackedAttention(torch.tensor(starts)), where - 1, input_ids[where])

    def _draw(self) -> Sequence[Message]:
        (which,) = self._rng.choices(range(len(self._environments)), self._weights)
        environment, index = self._environments[which], self._next_index[which]
        self._next_index[which] += 1
        correct = self._rng.random() < self._correct_share
        return environment.demonstration(environment.prompt("train", index), correct=correct, rng=self._rng)
