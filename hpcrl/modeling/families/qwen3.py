"""Qwen3, dense and with experts."""

from __future__ import annotations

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.mlp import GatedMLP
from hpcrl.modeling.layers.moe import Experts, SoftmaxRouter, SparseMLP
from hpcrl.models.arch import Qwen3Arch, Qwen3MoeArch

__all__ = ["qwen3_block", "qwen3_moe_block"]


def qwen3_block(arch: Qwen3Arch, layer: int) -> nn.Module:
    """A layer of dense Qwen3."""
    return Block(arch, GroupedQueryAttention(arch, layer), GatedMLP(arch.hidden_size, arch.intermediate_size))


def qwen3_moe_block(arch: Qwen3MoeArch, layer: int) -> nn.Module:
    """A layer of Qwen3-MoE: dense where the config says so."""
    if not arch.is_sparse(layer):
        return Block(arch, GroupedQueryAttention(arch, layer), GatedMLP(arch.hidden_size, arch.intermediate_size))
    gate = SoftmaxRouter(
        arch.hidden_size, arch.num_experts, top_k=arch.num_experts_per_tok, normalise=arch.norm_topk_prob
    )
    experts = Experts(arch.hidden_size, arch.num_experts, arch.moe_intermediate_size)
    return Block(arch, GroupedQueryAttention(arch, layer), SparseMLP(layer, gate, experts))
