"""Qwen3 with experts; dense Qwen3 has the layers of `hpcrl.modeling.families.dense`."""

from __future__ import annotations

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.families.dense import dense_block
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.moe import Experts, SoftmaxRouter, SparseMLP
from hpcrl.models.arch import Qwen3MoeArch


def qwen3_moe_block(arch: Qwen3MoeArch, layer: int) -> nn.Module:
    """Return a layer of Qwen3-MoE; the config says which ones are dense."""
    if not arch.is_sparse(layer):
        return dense_block(arch, layer)
    gate = SoftmaxRouter(
        arch.hidden_size, arch.num_experts, top_k=arch.num_experts_per_tok, normalise=arch.norm_topk_prob
    )
    experts = Experts(arch.hidden_size, arch.num_experts, arch.moe_intermediate_size)
    return Block(arch, GroupedQueryAttention(arch, layer), SparseMLP(layer, gate, experts))
