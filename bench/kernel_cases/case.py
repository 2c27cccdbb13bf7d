"""One thing to compute, and who can."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

Make = Callable[[], Callable[[], Any]]
"""Makes what is run; raises `NotHere`, or what hpcrl raises, where it cannot be."""


class NotHere(Exception):
    """A candidate that is not installed, or is not for this device."""


class Case(NamedTuple):
    """``flops`` of the products; 0 where there are none to speak of."""

    kind: str
    sizes: dict[str, int]
    flops: float
    candidates: dict[str, Make]


def library(name: str) -> Any:
    """A package that is not ours."""
    try:
        return import_module(name)
    except Exception as error:
        # it looks for compilers and drivers while it is imported, and raises what it likes
        raise NotHere(f"{name} does not load: {type(error).__name__}: {error}") from error
