"""What `kernels.py` measures, by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernel_cases.attention import dense, index, sparse
from kernel_cases.case import Case
from kernel_cases.fp8 import fp8
from kernel_cases.head import head

__all__ = ["KINDS"]

KINDS: dict[str, Callable[[torch.device, bool], Iterator[Case]]] = {
    "sparse": sparse,
    "index": index,
    "dense": dense,
    "head": head,
    "fp8": fp8,
}
