"""Tensors in memory that a trainer shares with engines of its node."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcrl.weights.handover import SharedMemory, SharedTensor

__all__ = ["view_of"]


def view_of(memory: SharedMemory, tensor: SharedTensor) -> Tensor:
    """A tensor that lies in shared memory: a view, for as long as the memory is open."""
    dtype, count = getattr(torch, tensor.dtype), math.prod(tensor.shape)
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(memory.data, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)
