"""Refuses weights that are not finite when they are loaded: results computed with them would not be finite either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hpcrl.errors import HandoffError

#: bits of a byte that are all set in values that are not finite
_FP8_MASKS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def all_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor of any dtype are finite.

    Their sum is not finite where one of them is not. It is made in one pass; looking at each takes as long as all else
    that a merge does. If the sum overflows, each tensor is checked.
    """
    mask = _FP8_MASKS.get(tensor.dtype)
    if mask is not None:
        return not bool(((tensor.view(torch.uint8) & mask) == mask).any())
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def finite_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the version in ``path`` unchanged.

    Raises
    ------
    HandoffError
        A tensor has a number that is infinite or not a number.
    """
    for name, tensor in tensors:
        if not all_finite(tensor):
            raise HandoffError(
                f"{path}: tensor {name} has numbers that are infinite or not a number, so the version is not served\n"
                "    hint: the trainer has published broken weights, or they were damaged before their hashes were made"
            )
        yield name, tensor
