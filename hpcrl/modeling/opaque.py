"""What is no part of a compiled layer: a mark for methods, which `hpcrl.trainer.memory.compiled` reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import nn

__all__ = ["opaque", "opaque_methods"]

_F = TypeVar("_F", bound=Callable[..., object])
_OPAQUE: set[Callable[..., object]] = set()


def opaque(method: _F) -> _F:
    """A decorator of methods of modules: they run as they are when the layer around them is compiled.

    They ask the batch context or other ranks, and alone read what differs between layers of a kind (their numbers): a
    graph that has it would be one for each layer.
    """
    _OPAQUE.add(method)
    return method


def opaque_methods(module: nn.Module) -> list[str]:
    """Names of the methods of ``module`` that are marked."""
    members = inspect.getmembers(type(module), inspect.isfunction)
    return [name for name, member in members if member in _OPAQUE]
