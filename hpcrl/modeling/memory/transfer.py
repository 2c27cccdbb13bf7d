"""Copies arrays that the host makes for a pass to the device: one asynchronous copy.

A copy from ordinary memory, and a copy of one array after another, keeps the host waiting for all that the device still
has to compute. So arrays are concatenated in one piece of pinned memory, and are sent in one queued copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

T = TypeVar("T")
P = ParamSpec("P")
_ALIGNED = 16
"""Alignment of each array in bytes: kernels read wide words."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy host tensors of any shapes and dtypes to ``device``; return them in their order.

    On the host itself they are returned as they are. Otherwise the copy is asynchronous: later computations on
    ``device`` are queued after it.
    """
    if device.type == "cpu":
        return list(tensors)
    # the allocator of pinned memory does not reuse it before the copy has been made
    return _apart(_together(tensors, pinned=torch.accelerator.is_available()).to(device, non_blocking=True), tensors)


def _together(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Return the bytes of ``tensors``, concatenated."""
    bytes_of_all = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(_apart(bytes_of_all, tensors), tensors, strict=True):
        part.copy_(tensor)
    return bytes_of_all


def _apart(bytes_of_all: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views with the dtypes and shapes of other tensors, in the order of `_together`."""
    parts = torch.split(bytes_of_all, [_room(tensor) for tensor in like])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def move(values: T, device: torch.device) -> T:
    """Return ``values`` with every tensor in it on ``device``, by one copy.

    Tensors are found in tuples, lists, dicts and objects of classes that are `movable`, and are those of the host.
    """
    leaves, form = tree_flatten(values)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, tensor in zip(where, to_device([leaves[i] for i in where], device), strict=True):
        leaves[i] = tensor
    moved: T = tree_unflatten(leaves, form)
    return moved


def kept_for_layers(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that caches the last ``most`` results, because all layers of a pass request the same.

    Results are real tensors even in a fake-tensor mode, because a later caller may run outside of it.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        def real(*args: P.args, **kwargs: P.kwargs) -> T:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return cast("Callable[P, T]", lru_cache(maxsize=most)(real))

    return wrap


def movable(kind: type[T]) -> type[T]:
    """Register a class so that `move` finds the tensors among the attributes of its objects."""

    def unflatten(values: Any, names: Any) -> T:
        made = kind.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made

    register_pytree_node(kind, lambda value: (list(vars(value).values()), list(vars(value))), unflatten)
    return kind
