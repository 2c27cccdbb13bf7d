"""Division of the experts of a layer over the ranks that hold the same ones."""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 128
"""Rows and columns of one scale of FP8: a part of whole blocks has all it needs for its scales."""


def sharded_dimension(shape: Sequence[int], ranks: int) -> int:
    """Return the dimension along which a tensor of experts is divided over ``ranks``.

    FSDP2 gives every rank ``ceil(size / ranks)`` of it, and divides a dimension behind the first one only into equal
    parts. So each rank has whole experts where they divide evenly. Otherwise it has an equal part of every expert, of
    whole blocks of FP8 where that can be. Where no dimension divides, ranks have whole experts with padding.

    Parameters
    ----------
    shape:
        Shape of the tensor, experts first: those of one rank of expert parallelism.
    """
    if shape[0] % ranks == 0:
        return 0
    for unit in (_BLOCK, 1):
        for dimension, size in enumerate(shape[1:], start=1):
            if size % (ranks * unit) == 0:
                return dimension
    return 0
