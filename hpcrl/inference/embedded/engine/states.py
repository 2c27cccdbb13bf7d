"""States of recurrent layers, a row for each running sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcrl.modeling.recurrence.delta_rule import DeltaRule, delta_rule
from hpcrl.modeling.recurrence.state_space import Scan, convolve, scan
from hpcrl.models.arch import ModelArch


class RecurrentStates:
    """The last inputs of convolutions, and states in float32, of every row and recurrent layer.

    Attributes
    ----------
    conv, recurrent:
        By layer: ``[rows, width - 1, channels]``, and ``[rows, *StateShape.recurrent]`` float32.
    """

    def __init__(self, arch: ModelArch, rows: int, dtype: torch.dtype) -> None:
        """Take memory for ``rows`` sequences; none where no layer is recurrent."""
        self.conv: dict[int, Tensor] = {}
        self.recurrent: dict[int, Tensor] = {}
        if (shape := arch.state) is not None:
            for layer in shape.layers:
                self.conv[layer] = torch.zeros(rows, *shape.conv, dtype=dtype)
                self.recurrent[layer] = torch.zeros(rows, *shape.recurrent)

    @staticmethod
    def bytes_per_row(arch: ModelArch, dtype: torch.dtype) -> int:
        """Return the bytes of one sequence over all layers."""
        if (shape := arch.state) is None:
            return 0
        return len(shape.layers) * (shape.conv[0] * shape.conv[1] * dtype.itemsize + 4 * int(np.prod(shape.recurrent)))


class StepStates:
    """A `hpcrl.modeling.context.RecurrenceFn` over the rows of one step: reads and stores their states."""

    def __init__(self, states: RecurrentStates, rows: NDArray[np.int64], starts: Sequence[int]) -> None:
        """Find the rows.

        Parameters
        ----------
        rows:
            ``[n]``: of each sequence of the step.
        starts:
            ``[n + 1]``: where its tokens begin among those of the step, and the end of the last.
        """
        self._states, self._rows, self._starts = states, torch.from_numpy(rows), starts

    def begin(self, fresh: NDArray[np.bool_]) -> None:
        """Reset the rows of sequences that begin with this step, given by ``fresh [n]``."""
        begun = self._rows[torch.from_numpy(fresh)]
        for states in (self._states.conv, self._states.recurrent):
            for state in states.values():
                state.index_fill_(0, begun, 0.0)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `RecurrenceFn`."""
        kept = self._states.conv[layer]
        y, after = convolve(x, weight, bias, self._starts, kept[self._rows])
        kept.index_copy_(0, self._rows, after)
        return y

    def scan(self, layer: int, parts: Scan, chunk_size: int) -> Tensor:
        """See `RecurrenceFn`."""
        kept = self._states.recurrent[layer]
        y, after = scan(parts, self._starts, chunk_size, kept[self._rows])
        kept.index_copy_(0, self._rows, after)
        return y

    def delta_rule(self, layer: int, parts: DeltaRule) -> Tensor:
        """See `RecurrenceFn`."""
        kept = self._states.recurrent[layer]
        y, after = delta_rule(parts, self._starts, before=kept[self._rows])
        kept.index_copy_(0, self._rows, after)
        return y
