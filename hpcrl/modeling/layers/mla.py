"""Multi-head latent attention: keys and values of all heads are made from one latent vector a token.

DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hpcrl.modeling.compile.opaque import opaque
from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.fp8.linear import effective_weight
from hpcrl.modeling.layers.norm import RMSNorm
from hpcrl.modeling.rope import RotaryTables, apply_rotary, yarn_mscale
from hpcrl.models.arch import DeepseekV3Arch


class LatentAttention(nn.Module):
    """DeepSeek-V3's attention in its expanded form, as training and prefill compute it.

    The layer expands latents, or an attention that gathers them.
    """

    def __init__(self, arch: DeepseekV3Arch, layer: int) -> None:
        super().__init__()
        self.layer, self.interleaved = layer, arch.rope_interleave
        self.nope_dim, self.rope_dim, self.value_dim = arch.qk_nope_head_dim, arch.qk_rope_head_dim, arch.v_head_dim
        self.latent_dim = arch.kv_lora_rank
        heads, d, eps, bias = arch.num_attention_heads, arch.hidden_size, arch.LATENT_NORM_EPS, arch.attention_bias
        width = self.nope_dim + self.rope_dim
        if arch.q_lora_rank is None:
            self.q_proj = nn.Linear(d, heads * width, bias=False)
        else:
            self.q_a_proj = nn.Linear(d, arch.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(arch.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(arch.q_lora_rank, heads * width, bias=False)
        self.compressed_queries = arch.q_lora_rank is not None
        self.kv_a_proj_with_mqa = nn.Linear(d, self.latent_dim + self.rope_dim, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, eps)
        self.kv_b_proj = nn.Linear(self.latent_dim, heads * (self.nope_dim + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, d, bias=bias)
        self.scale = width**-0.5
        scaling = arch.rope_scaling
        if scaling is not None and scaling.mscale_all_dim:
            # YaRN sharpens attention in a longer context; here on the scores, for channels without rotation too
            self.scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2

    def forward(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """Map ``[T, hidden_size]`` to the same shape."""
        tokens = x.shape[0]
        q = self._queries(x).view(tokens, -1, self.nope_dim + self.rope_dim)
        q_pass, q_rot = torch.split(q, [self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rot = torch.split(self.kv_a_proj_with_mqa(x), [self.latent_dim, self.rope_dim], dim=1)
        latent = self.kv_a_layernorm(latent)
        q = torch.cat((q_pass, apply_rotary(q_rot, rotary, interleaved=self.interleaved)), dim=-1)
        k_rot = apply_rotary(k_rot[:, None], rotary, interleaved=self.interleaved)
        if context.latent is None:
            k, v = self._expanded(latent, k_rot)
            y = self.attend(q, k, v, context)
        else:
            rows = torch.cat((latent, k_rot[:, 0]), dim=1)
            y = self.attend_latents(q, rows, effective_weight(self.kv_b_proj), context)
        projected: Tensor = self.o_proj(y.reshape(tokens, -1))
        return projected

    def _expanded(self, latent: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads; all share one rotary key."""
        expanded = self.kv_b_proj(latent).view(len(latent), -1, self.nope_dim + self.value_dim)
        k_pass, v = torch.split(expanded, [self.nope_dim, self.value_dim], dim=-1)
        return torch.cat((k_pass, k_rot.expand(-1, k_pass.shape[1], -1)), dim=-1), v

    @opaque
    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.AttentionFn`."""
        return context.attention(self.layer, q, k, v, scale=self.scale)

    @opaque
    def attend_latents(self, q: Tensor, latents: Tensor, expand: Tensor, context: BatchContext) -> Tensor:
        """See `hpcrl.modeling.context.LatentAttentionFn`."""
        assert context.latent is not None
        return context.latent.attend_latents(self.layer, q, latents, expand, scale=self.scale)

    def _queries(self, x: Tensor) -> Tensor:
        q: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.compressed_queries else self.q_proj(x)
        return q
