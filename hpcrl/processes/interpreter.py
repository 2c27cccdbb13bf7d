"""Starts Python interpreters so that they do not import from the working directory.

``python -m`` puts the working directory first in ``sys.path``, ``python -c`` too. Then a file ``json.py`` or a
directory ``submitit/`` next to a recipe, possibly another user's, would be imported by hpcrl. ``-P`` excludes it;
``PYTHONSAFEPATH`` does the same for interpreters that start from ours with a command line of their own (workers of
torch and of vLLM).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_KEPT_KERNELS = "16"

SAFE_PATH_VARIABLES = {"PYTHONSAFEPATH": "1"}
"""Variables in the environment of every process of a run."""


def module_command(python: str, module: str, *arguments: str, unbuffered: bool = False) -> list[str]:
    """Return the command line that runs a module.

    Parameters
    ----------
    python:
        The interpreter, or a placeholder for it.
    unbuffered:
        Flush the output of the module at once.
    """
    return [python, *(["-u"] if unbuffered else []), "-P", "-m", module, *arguments]


def with_safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which interpreters do not import from their working directory.

    Empty entries of ``PYTHONPATH``, which ``PYTHONPATH=$PYTHONPATH:/more`` leaves, mean the working directory, and are
    removed.
    """
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    if path := [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]:
        kept["PYTHONPATH"] = os.pathsep.join(path)
    return {**kept, **SAFE_PATH_VARIABLES}


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import what the process needs for all of its life: the collector of cycles neither looks meanwhile nor later.

    torch brings some 300,000 permanent objects. The garbage collector would scan all of them each time their number
    has grown by a quarter, which is a fifth of the time that the imports of a trainer take, and find nothing.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def bound_kernel_caches() -> None:
    """Let torch keep few of the kernels that it makes for processors; before its first product in this process.

    oneDNN makes machine code for each shape of a product in bfloat16, and by default it and torch keep 1024 each, of
    some hundred KiB. Batches have other lengths in every step: a rank of a model of 0.2 million parameters grew from
    0.3 to 1.1 GiB in 60 steps, and stays at 0.25 GiB with this, for a third more of the processor's time. What the
    environment says already is left.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, _KEPT_KERNELS)
