"""Sums with the same result on every run and without a wait for the device: of rows that share a number, and running.

`torch.bincount` asks the device for the number of bins, even if it is given, and `torch.unique` how many numbers it
has found. `Tensor.index_add_` of floats adds in the order of arrival on accelerators, and `torch.cumsum` in any.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_rows(numbers: Tensor, bins: int) -> Tensor:
    """Count each of the numbers below ``bins`` among ``numbers``, ``[n]`` int64: ``[bins]`` int64."""
    return numbers.new_zeros(bins).scatter_add_(0, numbers, torch.ones_like(numbers))


def add_rows(target: Tensor, numbers: Tensor, values: Tensor) -> Tensor:
    """Add ``values [n, …]`` to the rows of ``target [bins, …]`` that ``numbers [n]`` names, in place and in order.

    On a CPU `Tensor.index_add_` goes through them one by one. On an accelerator `Tensor.index_put_` sorts them by row
    and adds up row by row.
    """
    if target.device.type == "cpu":
        return target.index_add_(0, numbers, values)
    return target.index_put_((numbers,), values, accumulate=True)


def running_sums(x: Tensor) -> Tensor:
    """Return the running sums over the rows of each matrix in ``x [c, rows, n]``, in the same shape.

    If torch is set to be deterministic it refuses `torch.cumsum` of floats on accelerators, and its gradient. A product
    with a triangle of ones replaces it there.
    """
    if x.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(1)
    return x.new_ones(x.shape[1], x.shape[1]).tril() @ x
