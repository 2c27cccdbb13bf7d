"""Tensors in memory that a trainer shares with engines of its node."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpcrl.weights.handover import SharedMemory, SharedTensor

__all__ = ["view_of"]


def view_of(memory: SharedMemory, tensor: SharedTensor) -> Tensor:
    """A tensor that lies in shared memory, with the shape and dtype of ``tensor``: a view, while the memory is open.

    On the host, and written through. What has no elements lies nowhere, and gets memory of its own.
    """
    dtype, count = getattr(torch, tensor.dtype), math.prod(tensor.shape)
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(memory.data, dtype=dtype, count=count, offset=tensor.offset).view(tensor.shape)
