"""Routed experts on their way to the trainer: opaque bytes with a shape and a dtype.

No process between engine and trainer reads them. In memory and on the wire they are one block of bytes in C order; a
decoded shard has views into the bytes that arrived, so that only the copy to the trainer's device is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray


def exact_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds the number of every expert: uint8 up to 256 experts."""
    return np.min_scalar_type(max(0, num_experts - 1))


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts of ``T`` tokens; row ``t`` is of the forward pass that had token ``t`` as its input.

    Attributes
    ----------
    dtype:
        Numpy's name of an unsigned integer (``|u1``, ``<u2``).
    shape:
        ``[T, layers, experts_per_token]``.
    data:
        The experts. In rows that are missing they mean nothing.
    present:
        ``[T]`` uint8: 1 where an engine recorded the experts.
    """

    dtype: str
    shape: tuple[int, int, int]
    data: memoryview
    present: memoryview

    def __post_init__(self) -> None:
        kind = np.dtype(self.dtype)
        if kind.kind != "u":
            raise ValueError(f"routed experts are unsigned integers, not {self.dtype}")
        if min(self.shape) < 0 or math.prod(self.shape) * kind.itemsize != self.data.nbytes:
            raise ValueError(f"{self.data.nbytes} bytes are not {self.shape} of {self.dtype}")
        if self.present.nbytes != self.shape[0]:
            raise ValueError(f"{self.present.nbytes} flags for {self.shape[0]} rows of routed experts")

    @classmethod
    def of(cls, experts: NDArray[Any], present: NDArray[np.uint8]) -> RoutedExperts:
        """Return the routed experts of two arrays; contiguous ones are not copied.

        The arrays are experts ``[T, layers, experts_per_token]`` and flags ``[T]``.
        """
        tokens, layers, width = experts.shape
        return cls(
            dtype=experts.dtype.str,
            shape=(tokens, layers, width),
            data=_bytes_of(experts),
            present=_bytes_of(present),
        )

    @property
    def experts(self) -> NDArray[Any]:
        """Return the experts ``[T, layers, experts_per_token]``, a view."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Return the flags ``[T]`` of rows that were recorded, a view."""
        return np.frombuffer(self.present, dtype=np.bool_)


def joined(parts: Sequence[RoutedExperts | None], lengths: Sequence[int]) -> RoutedExperts | None:
    """Return the routed experts of sequences that are packed one after the other.

    Parameters
    ----------
    parts:
        Routed experts of each sequence; None where an engine recorded none.
    lengths:
        Tokens of each sequence.

    Returns
    -------
    RoutedExperts
        Routed experts of all tokens; None where none were recorded.

    Raises
    ------
    ValueError
        Sequences differ in layers, experts of a token or dtype, or have another length.
    """
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    experts = np.zeros((sum(lengths), *first.shape[1:]), dtype=first.dtype)
    present = np.zeros(sum(lengths), dtype=np.uint8)
    start = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None:
            if (part.dtype, part.shape) != (first.dtype, (length, *first.shape[1:])):
                what = f"{part.shape} of {part.dtype} next to {first.shape[1:]} of {first.dtype}"
                raise ValueError(f"routed experts of a sequence of {length} tokens do not fit: {what}")
            experts[start : start + length] = part.experts
            present[start : start + length] = part.known
        start += length
    return RoutedExperts.of(experts, present)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
