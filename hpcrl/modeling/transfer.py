"""What is made on the host for a pass, on its way to the device: one copy, which nobody waits for.

A copy from ordinary memory, and a copy of one array after another, keeps the host waiting for all that the device still
has to compute. So arrays lie side by side in one piece of pinned memory, and go in one copy behind what is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

__all__ = ["kept_for_layers", "movable", "move", "to_device"]

T = TypeVar("T")
P = ParamSpec("P")
_ALIGNED = 16
"""Every array begins at a multiple of so many bytes: kernels read wide words."""


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host, of any shapes and dtypes, on ``device``, in their order.

    Where that is the host itself they are kept as they are. Else nobody waits for the copy: what is computed on
    ``device`` afterwards comes behind it.
    """
    if device.type == "cpu":
        return list(tensors)
    # the allocator of pinned memory gives it to nobody else before the copy is made
    return _apart(_together(tensors, pinned=torch.accelerator.is_available()).to(device, non_blocking=True), tensors)


def _together(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """The bytes of ``tensors``, side by side."""
    bytes_of_all = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(_apart(bytes_of_all, tensors), tensors, strict=True):
        part.copy_(tensor)
    return bytes_of_all


def _apart(bytes_of_all: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views with the dtypes and shapes of other tensors, in the order of `_together`."""
    parts = torch.split(bytes_of_all, [_room(tensor) for tensor in like])
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, like, strict=True)
    ]


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def move(values: T, device: torch.device) -> T:
    """``values`` with every tensor in it on ``device``, by one copy.

    Tensors are found in tuples, lists, dicts and objects of classes that are `movable`, and are those of the host.
    """
    leaves, form = tree_flatten(values)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, tensor in zip(where, to_device([leaves[i] for i in where], device), strict=True):
        leaves[i] = tensor
    moved: T = tree_unflatten(leaves, form)
    return moved


def kept_for_layers(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: the last ``most`` results are kept, because all layers of a pass ask for the same.

    They are real tensors also where others are fake: whoever comes next may not be.
    """

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        def real(*args: P.args, **kwargs: P.kwargs) -> T:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return cast("Callable[P, T]", lru_cache(maxsize=most)(real))

    return wrap


def movable(kind: type[T]) -> type[T]:
    """A decorator: `move` finds the tensors among the attributes of objects of this class."""

    def unflatten(values: Any, names: Any) -> T:
        made = kind.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made

    register_pytree_node(kind, lambda value: (list(vars(value).values()), list(vars(value))), unflatten)
    return kind
