"""Grouped-query attention."""

from __future__ import annotations

from torch import Tensor, nn

from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.layers.norm import RMSNorm
from hpcrl.modeling.rope import RotaryTables, apply_rotary

__all__ = ["GroupedQueryAttention"]


class GroupedQueryAttention(nn.Module):
    """Queries share keys and values in groups; optionally with norms of each head and with biases."""

    def __init__(
        self,
        hidden_size: int,
        layer: int,
        *,
        heads: int,
        key_heads: int,
        head_dim: int,
        qk_norm_eps: float | None,
        bias: bool,
        output_bias: bool,
        norms_of_all_heads: bool = False,
    ) -> None:
        """Make the projections.

        Parameters
        ----------
        qk_norm_eps:
            Of the norms of queries and keys; None: there are none.
        bias, output_bias:
            Of query, key and value, and of the output.
        norms_of_all_heads:
            Queries and keys are normed over the channels of all heads, not of each head alone.
        """
        super().__init__()
        self.layer, self.head_dim = layer, head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, key_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=output_bias)
        widths = (heads * head_dim, key_heads * head_dim) if norms_of_all_heads else (head_dim, head_dim)
        self.norms_of_all_heads = norms_of_all_heads
        self.q_norm, self.k_norm = (None if qk_norm_eps is None else RMSNorm(width, qk_norm_eps) for width in widths)

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """``[T, hidden_size]`` to the same."""
        tokens = x.shape[0]
        q, k = self.q_proj(x), self.k_proj(x)
        if not self.norms_of_all_heads:
            q, k = q.view(tokens, -1, self.head_dim), k.view(tokens, -1, self.head_dim)
        v = self.v_proj(x).view(tokens, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.view(tokens, -1, self.head_dim), k.view(tokens, -1, self.head_dim)
        y = context.attention(self.layer, apply_rotary(q, rotary), apply_rotary(k, rotary), v)
        projected: Tensor = self.o_proj(y.reshape(tokens, -1))
        return projected
