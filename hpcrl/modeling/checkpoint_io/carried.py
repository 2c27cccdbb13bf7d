"""Published tensors that no forward pass reads: they are loaded, saved and published as they are.

They are buffers of the model by the names that they have in the published one behind ``carried.``:
no optimizer has them, no rank gathers them, and each keeps the dtype of its file. What a file has in block FP8 is
brought back to bfloat16, as the rest of the model is brought back: a version says once how all of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcrl.errors import UsageError
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import CARRIED, HfAdapter
from hpcrl.weights.format.quantise import FP8_DTYPE
from hpcrl.weights.read.model_files import ModelFiles
from hpcrl.weights.read.stored_weights import SCALE_SUFFIX, dtype_problem


class CarriedTensor(NamedTuple):
    """A published tensor that is carried through.

    Attributes
    ----------
    name:
        Published name.
    dtype:
        Torch's name of it.
    shape:
        Published shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def find_mtp_tensors(model_dir: Path, adapter: HfAdapter, *, checked: bool = True) -> list[CarriedTensor]:
    """Return the tensors of multi-token prediction in the files of ``model_dir``, by name; only file headers are read.

    Without ``checked`` the result includes tensors that cannot be loaded.

    Raises
    ------
    UsageError
        The directory has no complete safetensors files, or one of these tensors has a dtype, or scales, that cannot be
        read.
    """
    with ModelFiles(model_dir) as files:
        stored = {name: block for name, block in files.tensors.items() if adapter.is_mtp(name)}
        scales = {name + SCALE_SUFFIX for name, block in stored.items() if block.dtype == FP8_DTYPE}
        for name in sorted(stored.keys() - scales if checked else ()):
            if problem := dtype_problem(name, files.tensors):
                raise UsageError(f"{model_dir}: {problem}")
    return [
        CarriedTensor(name, "bfloat16" if block.dtype == FP8_DTYPE else block.dtype, block.shape)
        for name, block in sorted(stored.items())
        if name not in scales
    ]


def carry(model: Decoder, tensors: list[CarriedTensor], empty: Callable[[CarriedTensor], Tensor]) -> None:
    """Give ``model`` a buffer for each of ``tensors``, as ``empty`` makes it: sharded, whole or without memory.

    The result of ``empty`` has the shape and the dtype of its argument.
    """
    for tensor in tensors:
        *path, leaf = f"{CARRIED}{tensor.name}".split(".")
        module: nn.Module = model
        for name in path:
            if name not in dict(module.named_children()):
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        made = empty(tensor)
        assert made.dtype == getattr(torch, tensor.dtype), tensor.name
        module.register_buffer(leaf, made)
