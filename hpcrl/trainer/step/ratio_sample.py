"""A sample of a step's rollouts whose log-ratios are recorded token by token, for people who read rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcrl.dock.wire import BatchShard
from hpcrl.runs.token_ratios import RolloutRatios, tokens_digest

MOST_ROLLOUTS = 6
"""Maximum number of rollouts of a step."""
MOST_TOKENS = 4096
"""Maximum number of sampled tokens of one of them; longer rollouts are not in the sample."""
_DIGITS = 5


class _Place(NamedTuple):
    """A rollout and its trained tokens among those of its micro-batch."""

    group: int
    member: int
    tokens: slice
    advantage: float
    digest: int


class RatioSample:
    """Collects the log-ratios of some rollouts of a step, on the device; nothing waits for it before `fetch`.

    Parameters
    ----------
    places:
        The rollouts by the number of their micro-batch.
    """

    def __init__(self, places: Mapping[int, Sequence[_Place]]) -> None:
        self._places = places
        self._found: list[tuple[_Place, Tensor]] = []

    @classmethod
    def of_shard(cls, shard: BatchShard) -> RatioSample:
        """Choose the rollouts with the lowest, the middle and the highest advantages of a shard.

        Rollouts of several sequences, which may be in several micro-batches, are not chosen.
        """
        several = Counter(rollout for batch in shard.micro_batches for rollout in batch.rollouts)
        found: list[tuple[int, _Place]] = []
        for number, batch in enumerate(shard.micro_batches, start=1):
            numbers = batch.sequences or [0] * len(batch.rollouts)
            # trained tokens of a sequence are one range of those of its micro-batch
            trained = np.concatenate(([0], np.cumsum(batch.loss_mask, dtype=np.int64)))
            ends = trained[batch.cu_seqlens].tolist()
            for place, (group, member) in enumerate(batch.rollouts):
                begin, end = ends[place], ends[place + 1]
                if several[group, member] == 1 and not numbers[place] and 0 < end - begin <= MOST_TOKENS:
                    own = slice(int(batch.cu_seqlens[place]), int(batch.cu_seqlens[place + 1]))
                    sampled = batch.loss_mask[own] != 0
                    advantage = float(batch.advantages[own][sampled][0])
                    digest = tokens_digest(batch.token_ids[own][sampled])
                    found.append((number, _Place(group, member, slice(begin, end), advantage, digest)))
        found.sort(key=lambda each: each[1].advantage)
        places: dict[int, list[_Place]] = {}
        for index in _ends_and_middle(len(found)):
            number, chosen = found[index]
            places.setdefault(number, []).append(chosen)
        return cls(places)

    def add(self, number: int, log_ratio: Tensor) -> None:
        """Copy the log-ratios of the chosen rollouts of a micro-batch, on the device.

        Parameters
        ----------
        number:
            Number of the micro-batch in its shard, from 1.
        log_ratio:
            ``[N]``: log-ratios of its trained tokens.
        """
        for place in self._places.get(number, ()):
            self._found.append((place, log_ratio.detach()[place.tokens].clone()))

    def fetch(self) -> list[RolloutRatios]:
        """Return the log-ratios; waits for the device."""
        if not self._found:
            return []
        values = torch.cat([tensor for _, tensor in self._found]).double().cpu().tolist()
        rows, begin = [], 0
        for place, tensor in self._found:
            own = values[begin : begin + len(tensor)]
            begin += len(tensor)
            known = [round(value, _DIGITS) if np.isfinite(value) else None for value in own]
            rows.append(RolloutRatios(place.group, place.member, place.digest, known))
        return rows


def _ends_and_middle(count: int) -> list[int]:
    """Return the first, the middle and the last of ``count`` places, at most `MOST_ROLLOUTS` together."""
    if count <= MOST_ROLLOUTS:
        return list(range(count))
    part = MOST_ROLLOUTS // 3
    middle = (count - part) // 2
    return sorted({*range(part), *range(middle, middle + part), *range(count - part, count)})
