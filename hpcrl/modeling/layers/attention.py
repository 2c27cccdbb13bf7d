"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.layers.norm import norm_of
from hpcrl.modeling.rope import RotaryTables, apply_rotary
from hpcrl.models.arch import GroupedQueryArch


class GroupedQueryAttention(nn.Module):
    """Queries share keys and values in groups; optionally with norms, biases, a window, sinks and an output gate."""

    def __init__(self, arch: GroupedQueryArch, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, arch.head_dim
        hidden, bias = arch.hidden_size, arch.attention_bias
        queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
        self.gated = arch.output_gate
        # of each head a query, then its gate
        self.q_proj = nn.Linear(hidden, 2 * queries if self.gated else queries, bias=bias)
        self.k_proj = nn.Linear(hidden, keys, bias=bias)
        self.v_proj = nn.Linear(hidden, keys, bias=bias)
        self.o_proj = nn.Linear(queries, hidden, bias=bias and arch.output_bias)
        self.window = arch.window(layer)
        self.sinks = nn.Parameter(torch.empty(arch.num_attention_heads)) if arch.sinks else None
        self.norms_of_all_heads = arch.qk_norm == "all"
        self.q_norm = self.k_norm = None
        if arch.qk_norm != "none":
            widths = (queries, keys) if self.norms_of_all_heads else (arch.head_dim, arch.head_dim)
            self.q_norm, self.k_norm = (norm_of(arch, width) for width in widths)

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        tokens = x.shape[0]
        q, k, gate = self.q_proj(x), self.k_proj(x), None
        if self.gated:
            q, gate = q.view(tokens, -1, 2 * self.head_dim).chunk(2, dim=-1)
            q = q.flatten(1) if self.norms_of_all_heads else q
        if not self.norms_of_all_heads:
            q, k = q.reshape(tokens, -1, self.head_dim), k.view(tokens, -1, self.head_dim)
        v = self.v_proj(x).view(tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.view(tokens, -1, self.head_dim), k.view(tokens, -1, self.head_dim)
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        y = self.attend(q, k, v, context)
        if gate is not None:
            y = y * gate.sigmoid()
        projected: Tensor = self.o_proj(y.reshape(tokens, -1))
        return projected

    @opaque
    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.AttentionFn`."""
        return context.attention(self.layer, q, k, v, window=self.window, sinks=self.sinks)
