"""Tensors in memory that a trainer shares with engines of its node."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcrl.weights.handover import SharedMemory, SharedTensor


def view_of(memory: SharedMemory, tensor: SharedTensor) -> Tensor:
    """Return a host tensor with the shape and dtype of ``tensor`` as a view of shared memory, while that is open.

    Writes go to the shared memory. A tensor without elements has no place there, and gets memory of its own.
    """
    dtype, count = getattr(torch, tensor.dtype), math.prod(tensor.shape)
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(memory.data, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)
