"""The feed-forward block of dense layers, and of the experts that every token visits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.modeling.layers.swiglu import swiglu


class GatedMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))`` (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, hidden_size]`` to the same shape."""
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return y


class SquaredMLP(nn.Module):
    """Without a gate: ``down(relu(up(x))²)`` (So et al. 2021, Primer, arXiv 2109.08668)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[…, hidden_size]`` to the same shape."""
        y: Tensor = self.down_proj(F.relu(self.up_proj(x)).square())
        return y
