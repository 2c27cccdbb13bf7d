"""Registers functions as operators of torch, so that a recomputed layer can keep what they returned.

Torch tells a dispatch mode of each operator that runs. A collective, or attention in pieces, would be many small ones
there; as an operator of its own it is one, whose result can be kept and given back in place of running it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

KEPT = {
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
}
"""Names of operators that are expensive to recompute: products of experts, attention, and those of `register_op`."""


def register_op(schema: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that registers a function as the operator ``hpcrl::<name of the function>``.

    Gradients do not flow through it: use it in the forward pass of a `torch.autograd.Function`.

    Parameters
    ----------
    schema:
        Schema of arguments and results, as torch writes it: ``(Tensor rows, str group) -> Tensor``. Results share no
        memory with arguments.
    """

    def wrap(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = f"hpcrl::{function.__name__.lstrip('_')}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        KEPT.add(name)
        return operator

    return wrap
