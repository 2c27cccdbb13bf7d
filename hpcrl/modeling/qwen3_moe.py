"""A Qwen3-MoE decoder in plain torch, shared by the trainer and the embedded engine.

Tokens are laid out flat, ``[tokens]``: several sequences lie one behind the other, and the attention that is
passed in knows where each begins. So the trainer runs packed batches and the engine runs prefill and
decode of many requests through the same weights and the same arithmetic, which is what keeps their
log-probabilities equal.

Experts are fused, ``gate_up_proj [E, 2F, D]`` and ``down_proj [E, D, F]``, so that FSDP and expert parallelism
shard one tensor a layer; `hpcrl.modeling.hf` maps them to the per-expert names of a published model.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcrl.models.arch import ModelArch

__all__ = ["AttentionFn", "Qwen3Moe", "RoutedExpertsRecorder"]


class AttentionFn(Protocol):
    """Causal attention over flat tokens; owns sequence boundaries and any KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Parameters
        ----------
        layer:
            Global layer number.
        q:
            ``[tokens, num_attention_heads, head_dim]``, rotated.
        k, v:
            ``[tokens, num_key_value_heads, head_dim]``, ``k`` rotated.

        Returns
        -------
        Tensor
            ``[tokens, num_attention_heads, head_dim]``.
        """
        ...


class RoutedExpertsRecorder(Protocol):
    """Receives the experts chosen by each layer."""

    def __call__(self, layer: int, experts: Tensor) -> None:
        """``experts`` is ``[tokens, num_experts_per_tok]``, int64, ordered by falling router weight."""
        ...


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32, as transformers computes it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight
        return y


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine for ``positions`` ``[tokens]``: two tensors ``[tokens, 1, head_dim]`` in float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[:, None] * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate half-split pairs (the GPT-NeoX convention, which Qwen uses)."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, arch: ModelArch, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, arch.head_dim
        q, kv = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
        self.q_proj = nn.Linear(arch.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(arch.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(arch.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, arch.hidden_size, bias=False)
        self.q_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)
        self.k_norm = RMSNorm(arch.head_dim, arch.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn) -> Tensor:
        tokens = x.shape[0]
        q = self.q_norm(self.q_proj(x).view(tokens, -1, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(tokens, -1, self.head_dim))
        v = self.v_proj(x).view(tokens, -1, self.head_dim)
        y = attention(self.layer, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
        projected: Tensor = self.o_proj(y.reshape(tokens, -1))
        return projected


class Experts(nn.Module):
    """All experts of a layer in two tensors."""

    def __init__(self, arch: ModelArch) -> None:
        super().__init__()
        e, d, f = arch.num_experts, arch.hidden_size, arch.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * f, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, f))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Run tokens that are sorted by expert.

        Parameters
        ----------
        x:
            ``[assignments, hidden_size]``, sorted by expert.
        counts:
            ``[num_experts]`` assignments of each expert.
        """
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offs=ends)


class SparseMLP(nn.Module):
    """Softmax router (float32) and the chosen experts."""

    def __init__(self, arch: ModelArch, layer: int) -> None:
        super().__init__()
        self.layer, self.top_k, self.normalise = layer, arch.num_experts_per_tok, arch.norm_topk_prob
        self.num_experts = arch.num_experts
        self.gate = nn.Linear(arch.hidden_size, arch.num_experts, bias=False)
        self.experts = Experts(arch)

    def forward(self, x: Tensor, record: RoutedExpertsRecorder | None) -> Tensor:
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if record is not None:
            record(self.layer, chosen)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        y = self.experts(x[order // self.top_k], counts)
        # back to token order and a sum over k in fixed order: index_add would sum in arrival order
        unsorted = torch.empty_like(y).index_copy(0, order, y).view(x.shape[0], self.top_k, -1)
        mixed: Tensor = (unsorted * weights.to(x.dtype)[..., None]).sum(1)
        return mixed


class Block(nn.Module):
    """One decoder layer: attention, then experts, each behind a norm and with a residual."""

    def __init__(self, arch: ModelArch, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.self_attn = SelfAttention(arch, layer)
        self.post_attention_layernorm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.mlp = SparseMLP(arch, layer)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFn, record: RoutedExpertsRecorder | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attention)
        x = x + self.mlp(self.post_attention_layernorm(x), record)
        return x  # noqa: RET504 - gives the sum its type


class Qwen3Moe(nn.Module):
    """The decoder. Weights are uninitialised until `init_weights` or a load."""

    def __init__(self, arch: ModelArch) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Block(arch, i) for i in range(arch.num_hidden_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps)
        self.lm_head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embeddings one parameter, where the model has them tied.

        To be called again after `torch.nn.Module.to_empty`, which makes a parameter of its own for each name.
        """
        if self.arch.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionFn,
        *,
        select: Tensor | None = None,
        record: RoutedExpertsRecorder | None = None,
    ) -> Tensor:
        """Logits of flat tokens.

        Parameters
        ----------
        input_ids, positions:
            ``[tokens]``, int64; positions restart at each sequence.
        attention:
            Knows the sequence boundaries.
        select:
            ``[selected]`` indices of tokens whose logits are wanted; all where omitted.
        record:
            Told the chosen experts of every layer.

        Returns
        -------
        Tensor
            ``[selected, vocab_size]``, float32.
        """
        cos, sin = rotary_tables(positions, self.arch.head_dim, self.arch.rope_theta)
        x = self.embed_tokens(input_ids)
        for block in self.layers:
            x = block(x, cos, sin, attention, record)
        x = self.norm(x)
        if select is not None:
            x = x[select]
        logits: Tensor = self.lm_head(x)
        return logits.float()

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Normal weights of ``std``; projections back into the residual stream are scaled by depth."""
        residual_std = std / (2 * self.arch.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                back = name.endswith(("o_proj.weight", "down_proj"))
                parameter.normal_(0.0, residual_std if back else std, generator=generator)
