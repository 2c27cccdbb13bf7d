"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), and the rotation of queries and keys.

Frequencies are as transformers computes them, those of YaRN (Peng et al. 2023, arXiv 2309.00071) among them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpcrl.models.arch import ModelArch, RopeScaling


class RotaryTables(NamedTuple):
    """Cosines and sines of ``T`` tokens, ``[T, 1, rotary_dim]`` in float32; both halves of the last axis are equal."""

    cos: Tensor
    sin: Tensor


def rotary_tables(arch: ModelArch, positions: Tensor) -> RotaryTables:
    """Return tables for ``positions [T]``; with YaRN they are multiplied by its attention factor."""
    frequencies, factor = _frequencies(arch, positions.device)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=1)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return RotaryTables(cos, sin) if factor == 1.0 else RotaryTables(cos * factor, sin * factor)


def apply_rotary(x: Tensor, tables: RotaryTables, *, interleaved: bool = False) -> Tensor:
    """Rotate the first ``rotary_dim`` channels of each head; the others stay.

    Parameters
    ----------
    x:
        ``[T, heads, channels]``.
    tables:
        Tables for the same tokens.
    interleaved:
        Pairs are neighbours (0, 1), (2, 3), … as DeepSeek stores them, and the result has their first members before
        their second ones; otherwise a pair is a channel of the first half and the same of the second half.
    """
    width = tables.cos.shape[-1]
    if not width:
        return x
    cos, sin = (table[..., : width // 2] for table in tables)
    if torch.compiler.is_compiling() or not x.requires_grad:
        return _rotate(x, cos, sin, interleaved=interleaved)
    y: Tensor = _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call]
    return y


def _pairs(x: Tensor, width: int, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return first and second members of the pairs among the first ``width`` channels."""
    if interleaved:
        return x[..., 0:width:2], x[..., 1:width:2]
    return x[..., : width // 2], x[..., width // 2 : width]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    width = 2 * cos.shape[-1]
    turned = _turn(_pairs(x, width, interleaved=interleaved), cos, sin, x.dtype)
    # concatenated once at the end: each copy of queries and keys costs as much as the rotation
    return torch.cat((*turned, x[..., width:]), dim=-1)


def _turn(pairs: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    first, second = pairs
    turned = (first * cos).sub_(second * sin), (second * cos).add_(first * sin)
    return turned[0].to(dtype), turned[1].to(dtype)


class _Rotation(torch.autograd.Function):
    """By hand, because the backward pass is a rotation too, by the negative angle; autograd makes it of many copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved=interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        if not ctx.interleaved:
            return _rotate(grad, cos, -sin, interleaved=False), None, None, None
        width = 2 * cos.shape[-1]
        back = _turn(_pairs(grad, width, interleaved=False), cos, -sin, grad.dtype)
        return torch.cat((torch.stack(back, dim=-1).flatten(-2), grad[..., width:]), dim=-1), None, None, None


def _frequencies(arch: ModelArch, device: torch.device) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of channels, and the factor of cosines and sines."""
    dim, theta, scaling = arch.rotary_dim, arch.rope_theta, arch.rope_scaling
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain = theta**-exponent
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, scaling, theta), _yarn_factor(scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch long waves, keep short ones, and interpolate between them."""
    assert scaling.original_max_position_embeddings
    assert scaling.low_freq_factor
    assert scaling.high_freq_factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # how often a wave turns in the old context
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Keep waves with over ``beta_fast`` turns in the old context, stretch those with under ``beta_slow``."""
    assert scaling.original_max_position_embeddings
    half = len(plain)

    def pair_of(turns: float) -> float:
        wave = scaling.original_max_position_embeddings / (turns * 2 * math.pi)  # type: ignore[operator]
        return half * math.log(wave) / math.log(theta)

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low or 0.001
    index = torch.arange(half, dtype=torch.float32, device=plain.device)
    stretched = ((index - low) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * stretched + plain * (1 - stretched)


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return ``0.1 · mscale · ln(factor) + 1``, which sharpens attention in a longer context; 1 if it is not longer.

    Of YaRN, arXiv 2309.00071; ``mscale`` is DeepSeek's.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
