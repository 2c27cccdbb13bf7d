"""Gated delta net: linear attention whose state is corrected towards the value of each key."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.recurrence.delta_rule import DeltaRule
from hpcrl.modeling.rope import RotaryTables
from hpcrl.models.arch import GatedDeltaArch


class HeadNumbers(nn.Linear):
    """Numbers of heads, one or two each, from a token; as a router it has no adapter and stays out of FP8."""


class _NormThenGate(nn.Module):
    """Root-mean-square norm of each head in float32, multiplied with ``silu(gate)``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map ``[T, heads, size]`` to the same shape."""
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)
        return (self.weight * normed * F.silu(gate.float())).to(x.dtype)


class GatedDeltaMixer(nn.Module):
    """The mixer of Qwen3-Next and Qwen3.5 (Yang et al. 2024, arXiv 2412.06464).

    Where its sequences begin and their states are those of the batch context.
    """

    def __init__(self, arch: GatedDeltaArch, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key_heads, self.heads = arch.linear_num_key_heads, arch.linear_num_value_heads
        self.key_dim, self.value_dim = arch.linear_key_head_dim, arch.linear_value_head_dim
        self.parts = [arch.key_size, arch.key_size, arch.value_size]
        hidden, channels = arch.hidden_size, sum(self.parts)
        self.interleaved = arch.INTERLEAVED
        if self.interleaved:
            self.in_proj_qkvz = nn.Linear(hidden, channels + arch.value_size, bias=False)
            self.in_proj_ba = HeadNumbers(hidden, 2 * self.heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
            self.in_proj_z = nn.Linear(hidden, arch.value_size, bias=False)
            self.in_proj_b = HeadNumbers(hidden, self.heads, bias=False)
            self.in_proj_a = HeadNumbers(hidden, self.heads, bias=False)
        # its parameters alone are used
        self.conv1d = nn.Conv1d(channels, channels, arch.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.norm = _NormThenGate(self.value_dim, arch.rms_norm_eps)
        self.out_proj = nn.Linear(arch.value_size, hidden, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        mixed, gate, strength, decay = self._grouped(x) if self.interleaved else self._apart(x)
        mixed = F.silu(self.convolve(mixed, context))
        queries, keys, values = (
            part.reshape(len(x), heads, -1)
            for part, heads in zip(
                torch.split(mixed, self.parts, dim=1), (self.key_heads, self.key_heads, self.heads), strict=True
            )
        )
        logs = -self.A_log.float().exp() * F.softplus(decay.float() + self.dt_bias.float())
        y = self.correct(DeltaRule(queries, keys, values, logs, strength.sigmoid().float()), context).to(x.dtype)
        mixed_down: Tensor = self.out_proj(self.norm(y, gate).flatten(1))
        return mixed_down

    def _grouped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the convolution and each head's gate, strength and decay, published by key heads."""
        repeats = self.heads // self.key_heads
        widths = [self.key_dim, self.key_dim, repeats * self.value_dim, repeats * self.value_dim]
        *convolved, gate = torch.split(self.in_proj_qkvz(x).view(len(x), self.key_heads, -1), widths, dim=-1)
        strength, decay = self.in_proj_ba(x).view(len(x), self.key_heads, -1).chunk(2, dim=-1)
        mixed = torch.cat([part.flatten(1) for part in convolved], dim=1)
        gate = gate.reshape(len(x), self.heads, self.value_dim)
        return mixed, gate, strength.flatten(1), decay.flatten(1)

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the same as `_grouped` for weights that are published separately."""
        gate = self.in_proj_z(x).view(len(x), self.heads, self.value_dim)
        return self.in_proj_qkv(x), gate, self.in_proj_b(x), self.in_proj_a(x)

    @opaque
    def convolve(self, x: Tensor, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.RecurrenceFn`.

        Raises
        ------
        ValueError
            Sequences are cut among ranks: their states are not handed on.
        """
        if context.recurrence is None:
            raise ValueError("context parallelism cannot cut sequences of layers with the gated delta rule")
        return context.recurrence.convolve(self.layer, x, self.conv1d.weight, self.conv1d.bias)

    @opaque
    def correct(self, parts: DeltaRule, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.RecurrenceFn`; behind `convolve`."""
        assert context.recurrence is not None
        return context.recurrence.delta_rule(self.layer, parts)
