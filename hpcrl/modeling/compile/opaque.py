"""Marks methods that are not part of a compiled layer, for `hpcrl.trainer.memory.compiled`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import nn

_F = TypeVar("_F", bound=Callable[..., object])
_OPAQUE: set[Callable[..., object]] = set()


def opaque(method: _F) -> _F:
    """Mark a method of a module: it runs uncompiled if the layer around it is compiled.

    Such methods use the batch context or other ranks, and only they read what differs between layers of a kind (their
    numbers): a graph with these numbers would have to be compiled for each layer.
    """
    _OPAQUE.add(method)
    return method


def opaque_methods(module: nn.Module) -> list[str]:
    """Return the names of the methods of ``module`` that are marked."""
    members = inspect.getmembers(type(module), inspect.isfunction)
    return [name for name, member in members if member in _OPAQUE]
