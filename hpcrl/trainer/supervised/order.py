"""Chooses the rows of the data that a step trains on: a pure function of the seed and the step.

An epoch has as many steps as its rows need, ``conversations_per_step`` each, counted before any is left out for its
length. Rows that are left are shared out evenly over these steps. So the steps of a run are known from the data alone,
each row is trained once in an epoch, and a restart continues with the rows of its step.
"""

from __future__ import annotations

import random
from functools import lru_cache

from hpcrl.config.sft import SftConfig
from hpcrl.errors import UsageError


def steps_of_epoch(rows: int, config: SftConfig) -> int:
    """Return the steps that ``rows`` training rows of the data take."""
    return -(-rows // config.conversations_per_step)


def run_steps(steps: int, rows: int, config: SftConfig) -> int:
    """Return the steps of a run: ``steps`` of the recipe, or those of ``sft.epochs`` where they are fewer."""
    return steps if config.epochs is None else min(steps, config.epochs * steps_of_epoch(rows, config))


class ConversationOrder:
    """The rows of each step."""

    def __init__(self, kept: int, rows: int, config: SftConfig, *, seed: int) -> None:
        """Distribute ``kept`` of ``rows`` training rows.

        Raises
        ------
        UsageError
            An epoch has more steps than rows are left.
        """
        self._kept, self._steps, self._shuffle, self._seed = kept, steps_of_epoch(rows, config), config.shuffle, seed
        if kept < self._steps:
            raise UsageError(
                f"{kept} of {rows} conversations are left for the {self._steps} steps of an epoch; the others are "
                f"longer than sft.max_len ({config.max_len})\n"
                "    hint: raise sft.max_len, or set sft.over_long: truncate"
            )
        self._of_epoch = lru_cache(maxsize=2)(self._make)

    def epoch(self, step: int) -> int:
        """Return the epoch of a step, from 0; steps count from 1."""
        return (step - 1) // self._steps

    def rows(self, step: int) -> list[int]:
        """Return the rows of a step, as numbers below ``kept``, ascending."""
        order = self._of_epoch(self.epoch(step))
        place, size, longer = (step - 1) % self._steps, *divmod(self._kept, self._steps)
        begin = place * size + min(place, longer)
        return sorted(order[begin : begin + size + (place < longer)])

    def _make(self, epoch: int) -> list[int]:
        order = list(range(self._kept))
        if self._shuffle:
            random.Random(f"conversations {self._seed} {epoch}").shuffle(order)
        return order
