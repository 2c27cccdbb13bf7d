"""The words for one tensor of a model: what it is part of, what type it has, along which dimension it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
"""Bytes of an element."""

FP8_BLOCK = 128
"""Side of the square blocks that share one scale in DeepSeek's FP8 format."""


class Part(StrEnum):
    """Part of a model that a tensor belongs to; totals and memory are counted by part."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    NORM = "norm"
    ATTENTION = "attention"
    INDEXER = "indexer"
    MAMBA = "mamba"
    LINEAR_ATTENTION = "linear_attention"
    ROUTER = "router"
    EXPERT = "expert"
    SHARED_EXPERT = "shared_expert"
    DENSE_MLP = "dense_mlp"
    MTP = "mtp"
    """Parts of a multi-token-prediction module other than its decoder layer."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Parameter of a module, by its name in the module.

    Attributes
    ----------
    name:
        For experts with ``{}`` in place of the number of the expert; without it a tensor holds all experts.
    shape:
        As published.
    part:
        Part of the model that it belongs to.
    tp_dim:
        Dimension that tensor parallelism cuts; None: every rank has a copy.
    dtype:
        Its dtype where that differs from the model's.
    quantised:
        Whether it is multiplied in FP8 where weights are, and stored so with a ``*_scale_inv``.
    copies:
        Equal tensors, one an expert.
    trained:
        False for what no gradient reaches (router biases that a rule outside of the loss moves).
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    tp_dim: int | None = None
    dtype: str | None = None
    quantised: bool = False
    copies: int = 1
    trained: bool = True

    @property
    def elements(self) -> int:
        """Return the number of elements of all copies."""
        return prod(self.shape) * self.copies


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a published model.

    Attributes
    ----------
    name, shape, dtype:
        As in the safetensors files.
    part:
        Part of the model that it belongs to.
    layer:
        Decoder layer; None outside of layers. Modules of multi-token prediction count on after the last layer.
    expert:
        Number of the expert: what expert parallelism cuts by. None also where one tensor holds all experts.
    tp_dim:
        Dimension that tensor parallelism cuts; None: every rank has a copy.
    is_scale:
        A scale of FP8 blocks: no parameter of the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    part: Part = Part.NORM
    layer: int | None = None
    expert: int | None = None
    tp_dim: int | None = None
    is_scale: bool = False

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the stored bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the FP8 scales of a matrix: one a block of 128 × 128, the last blocks may be smaller.

    A tensor of all experts has the matrices of each in its last two dimensions.
    """
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def mxfp4_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor in MXFP4, as gpt-oss is published.

    A number takes half a byte, and each block of 32 one byte.
    """
    return prod(shape) // 2 + prod(shape) // 32
