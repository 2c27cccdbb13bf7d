"""Loading libraries of GPU kernels that a trainer may have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(what: str, hint: str = "") -> Iterator[None]:
    """Turn whatever is raised inside into a LookupError that begins with ``what`` and ends with ``hint``.

    Such a library looks for compilers and drivers while it is imported, and may raise any type.
    """
    try:
        yield
    except Exception as error:
        raise LookupError(f"{what}: {type(error).__name__}: {error}{hint}") from error
