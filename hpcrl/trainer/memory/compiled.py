"""`torch.compile` of layers: kernels between products of matrices become one.

What a layer asks of its batch and of other ranks is not compiled (methods with the mark
`hpcrl.modeling.compile.opaque`): there the graph is interrupted. These are attention and recurrences, kernels of their
own that know where sequences begin; the choices of indexers and routers; experts with the exchanges around them. What
lies between is compiled once for all layers of a kind and all numbers of tokens. Products with experts are compiled by
themselves in bfloat16, which alone torch knows the shapes of.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcrl.errors import UsageError
from hpcrl.modeling.compile.opaque import opaque_methods
from hpcrl.modeling.decoder import DecoderLayer
from hpcrl.modeling.layers.moe import SparseMLP

BACKEND = "inductor"
"""Backend of torch that writes kernels in Triton for GPUs and in C++ for CPUs."""


def find_compiler(device: torch.device) -> None:
    """Check that ``device`` has a compiler for kernels.

    Raises
    ------
    UsageError
        It is not installed, or cannot be used with torch where that is.
    """
    if BACKEND != "inductor":
        return  # other backends run graphs without a compiler
    hint = "    hint: set trainer.memory.compile: false, or install one on the trainer's nodes"
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            raise UsageError(f"trainer.memory.compile needs Triton, and this environment has none\n{hint}")
        return
    from torch._inductor import config  # noqa: PLC0415 - importing it takes a second: only if layers are compiled

    names = [name for name in config.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        what = f"trainer.memory.compile needs a C++ compiler, and there is none ({', '.join(names)})"
        raise UsageError(f"{what}\n{hint}")
    place = Path(torch.__file__).parent
    if any(map(str.isspace, str(place))):
        # torch puts its directories into the compiler's command without quotes
        raise UsageError(
            f"trainer.memory.compile cannot be used on processors: torch is in {place}, a path with spaces\n"
            "    hint: set trainer.memory.compile: false, or make the environment in a directory without spaces"
        )


class _Opaque:
    """A function that runs as it is. Graphs depend on its type alone, so layers that have other ones share theirs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._function(*args, **keywords)


def compile_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the layers of ``model`` be compiled when they are first computed, in ``dtype``, by `BACKEND`."""
    for module in model.modules():
        for name in opaque_methods(module):
            setattr(module, name, _Opaque(getattr(module, name)))
        if isinstance(module, SparseMLP) and dtype == torch.bfloat16:
            module.experts.forward = torch.compile(module.experts.forward, dynamic=True, backend=BACKEND)
        if isinstance(module, DecoderLayer):
            compiled = torch.compile(module.compute, dynamic=True, backend=BACKEND)
            module.compute = compiled  # type: ignore[method-assign]
