"""Sums of rows that share a number, with the same result on every run and without a wait for the device.

`torch.bincount` asks the device how many bins there are, also where it is told, and `torch.unique` how many numbers it
has found. `Tensor.index_add_` of floats adds in the order of arrival on accelerators.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rows", "count_rows"]


def count_rows(numbers: Tensor, bins: int) -> Tensor:
    """How often each of the numbers below ``bins`` is among ``numbers``, ``[n]`` int64: ``[bins]`` int64."""
    return numbers.new_zeros(bins).scatter_add_(0, numbers, torch.ones_like(numbers))


def add_rows(target: Tensor, numbers: Tensor, values: Tensor) -> Tensor:
    """Add ``values [n, …]`` to the rows of ``target [bins, …]`` that ``numbers [n]`` names, in place and in order.

    On a CPU `Tensor.index_add_` goes through them one by one. On an accelerator `Tensor.index_put_` sorts them by row
    and adds up row by row.
    """
    if target.device.type == "cpu":
        return target.index_add_(0, numbers, values)
    return target.index_put_((numbers,), values, accumulate=True)
