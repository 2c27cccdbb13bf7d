"""Experts of a layer that lie in one tensor, as the matrices ``[out, in]`` of each expert.

Qwen3-VL is published with ``[experts, in, out]``, Qwen3.5 with ``[experts, out, in]``. transformers 5 writes the second
layout for Qwen3-VL, too. Shapes tell the layouts apart.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from typing import NamedTuple

_STACK = re.compile(r"(?P<prefix>.+\.mlp\.experts\.)(?P<leaf>gate_up_proj|down_proj)")
_DIMENSIONS = 3
_CODES = {1: "B", 2: "H", 4: "I"}
"""Array type codes by bytes of an element."""


class StackedExpert(NamedTuple):
    """Location of the matrix of an expert in the tensor of all experts.

    Attributes
    ----------
    expert:
        Its number.
    output:
        Index of its first output: gate and up projection are adjacent.
    shape:
        Shape of the tensor of all experts.
    inputs_first:
        Whether the layout is ``[experts, in, out]``, and not ``[experts, out, in]``.
    """

    expert: int
    output: int
    shape: tuple[int, ...]
    inputs_first: bool

    def block(self, low: tuple[int, int], high: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return first and last indices, in the tensor of all experts, of a block of the matrix ``[out, in]``."""
        outputs, inputs = (self.output + low[0], self.output + high[0]), (low[1], high[1])
        rows, columns = (inputs, outputs) if self.inputs_first else (outputs, inputs)
        return (self.expert, rows[0], columns[0]), (self.expert + 1, rows[1], columns[1])


def has_inputs_first(name: str, shape: tuple[int, ...], hidden_size: int) -> bool | None:
    """Return whether a tensor of all experts is ``[experts, in, out]``; None for other tensors.

    Where both layouts are possible, the result is False, as in transformers.
    """
    found = _STACK.fullmatch(name)
    if found is None or len(shape) != _DIMENSIONS:
        return None
    return shape[1 if found["leaf"] == "down_proj" else 2] != hidden_size


def stacked_experts(
    name: str, shape: tuple[int, ...], hidden_size: int
) -> Iterator[tuple[str, tuple[int, int], StackedExpert]]:
    """Yield name, shape ``[out, in]`` and place of each matrix in a tensor of all experts; none for other tensors."""
    found, inputs_first = _STACK.fullmatch(name), has_inputs_first(name, shape, hidden_size)
    if found is None or inputs_first is None:
        return
    inputs, outputs = shape[1:] if inputs_first else (shape[2], shape[1])
    parts = {"down_proj": 0} if found["leaf"] == "down_proj" else {"gate_proj": 0, "up_proj": outputs // 2}
    for expert in range(shape[0]):
        for part, output in parts.items():
            matrix = (outputs // len(parts), inputs)
            yield f"{found['prefix']}{expert}.{part}.weight", matrix, StackedExpert(expert, output, shape, inputs_first)


def transposed(data: bytearray, rows: int, columns: int, width: int) -> bytearray:
    """Return the elements of a matrix of ``rows`` × ``columns`` in C order as those of its transpose.

    Parameters
    ----------
    width:
        Bytes of an element: 1, 2 or 4.
    """
    source = array(_CODES[width])
    source.frombytes(data)
    target = array(_CODES[width], bytes(len(data)))
    for row in range(rows):
        target[row::rows] = source[row * columns : (row + 1) * columns]
    return bytearray(target)
