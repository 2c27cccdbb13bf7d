"""Mamba-2: a state of fixed size represents all earlier tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.recurrence.state_space import Scan
from hpcrl.modeling.rope import RotaryTables
from hpcrl.models.arch import NemotronHArch


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm of each group of channels of ``x · silu(gate)``, in float32."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map ``[T, size]`` float32 to the same shape."""
        gated = (x * F.silu(gate.float())).view(len(x), self.groups, -1)
        y: Tensor = self.weight * F.rms_norm(gated, gated.shape[-1:], None, self.eps).flatten(1)
        return y


class Mamba2(nn.Module):
    """A Mamba-2 mixer (Dao and Gu 2024); where its sequences begin and their states are those of the batch context."""

    def __init__(self, arch: NemotronHArch, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.head_dim = layer, arch.mamba_num_heads, arch.mamba_head_dim
        self.groups, self.chunk_size, self.least_step = arch.n_groups, arch.chunk_size, arch.time_step_min
        inner, channels = self.heads * self.head_dim, arch.conv_channels
        self.widths = [inner, channels, self.heads]
        self.parts = [inner, *[self.groups * arch.ssm_state_size] * 2]
        self.in_proj = nn.Linear(arch.hidden_size, sum(self.widths), bias=arch.use_bias)
        # its parameters alone are used
        self.conv1d = nn.Conv1d(channels, channels, arch.conv_kernel, groups=channels, bias=arch.use_conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = GatedRMSNorm(inner, self.groups, arch.rms_norm_eps)
        self.out_proj = nn.Linear(inner, arch.hidden_size, bias=arch.use_bias)

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        gate, mixed, dt = torch.split(self.in_proj(x), self.widths, dim=1)
        mixed = F.silu(self.convolve(mixed, context))
        values, keys, queries = (
            part.reshape(len(x), heads, -1)
            for part, heads in zip(
                torch.split(mixed, self.parts, dim=1), (self.heads, self.groups, self.groups), strict=True
            )
        )
        steps = F.softplus(dt.float() + self.dt_bias.float()).clamp(min=self.least_step)
        parts = Scan(values, steps, -self.A_log.float().exp(), keys, queries)
        y = self.scan(parts, context) + values * self.D.float()[:, None]
        mixed_down: Tensor = self.out_proj(self.norm(y.flatten(1), gate).to(x.dtype))
        return mixed_down

    @opaque
    def convolve(self, x: Tensor, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.RecurrenceFn`.

        Raises
        ------
        ValueError
            Sequences are cut among ranks: their states are not handed on.
        """
        if context.recurrence is None:
            raise ValueError("context parallelism cannot cut sequences of Mamba-2 layers")
        return context.recurrence.convolve(self.layer, x, self.conv1d.weight, self.conv1d.bias)

    @opaque
    def scan(self, parts: Scan, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.RecurrenceFn`; behind `convolve`."""
        assert context.recurrence is not None
        return context.recurrence.scan(self.layer, parts, self.chunk_size)
