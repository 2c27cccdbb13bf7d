"""Sources of the tensors that a sharded model publishes, and this rank's parts of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpcrl.modeling.blocks import HeldBlock, local_block, local_part, overlap
from hpcrl.modeling.hf import HfAdapter
from hpcrl.weights.format.layout import PublishedTensor
from hpcrl.weights.format.quantise import FP8_DTYPE, QuantisedModules, scale_tensor


class Form(StrEnum):
    """Form in which the elements of a parameter are published."""

    PLAIN = "plain"
    QUANTISED = "quantised"
    SCALES = "scales"


class Source(NamedTuple):
    """Origin of a published tensor.

    Attributes
    ----------
    tensor:
        The published tensor.
    parameter:
        Name of the parameter or buffer.
    low:
        First index of the region of the parameter.
    shape:
        Shape of the region, without the leading dimensions in which it has one element (an expert's number).
    form:
        Form in which it is published.
    """

    tensor: PublishedTensor
    parameter: str
    low: tuple[int, ...]
    shape: tuple[int, ...]
    form: Form


def find_sources(
    model: nn.Module, adapter: HfAdapter, dtype: torch.dtype, *, fp8: QuantisedModules | None
) -> list[Source]:
    """Return the sources of the published tensors of ``model``: parameters in its order, then buffers.

    Buffers stay in their dtype.
    """
    name_of_dtype = _name(dtype)
    sources = []
    for name, own in adapter.tensors(model).items():
        plain = name_of_dtype if isinstance(own, nn.Parameter) else _name(own.dtype)
        for hf_name, low, shape in adapter.regions(name, own.shape):
            if fp8 is not None and fp8.has(hf_name, shape):
                quantised = PublishedTensor(hf_name, FP8_DTYPE, shape)
                sources.append(Source(quantised, name, low, shape, Form.QUANTISED))
                sources.append(Source(scale_tensor(hf_name, shape), name, low, shape, Form.SCALES))
            else:
                sources.append(Source(PublishedTensor(hf_name, plain, shape), name, low, shape, Form.PLAIN))
    return sources


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def source_part(parameters: Mapping[str, Tensor], source: Source) -> tuple[HeldBlock, Tensor]:
    """Return this rank's part of a source: its block in the region, and a view of it with the region's dimensions.

    The view has the sizes of the part; if the rank holds nothing, both are empty.

    Parameters
    ----------
    parameters:
        This rank's tensors by name, sharded or not.
    """
    parameter = parameters[source.parameter]
    block = local_block(parameter)
    part = overlap(block, source.low, source.shape)
    local = local_part(parameter)
    if math.prod(part.high) == 0:
        return part, local.new_empty((0,) * len(source.shape))
    leading = len(source.low) - len(source.shape)
    for i in range(leading):
        local = local[source.low[i] - block.low[i]]
    for i, (low, high) in enumerate(zip(part.low, part.high, strict=True)):
        local = local.narrow(i, source.low[leading + i] + low - block.low[leading + i], high - low)
    return part, local
