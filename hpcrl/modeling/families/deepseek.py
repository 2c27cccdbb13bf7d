"""DeepSeek-V3, Kimi K2, GLM-4.5 to 4.7 and GLM-5: sigmoid routers with a correction bias, and shared experts."""

from __future__ import annotations

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.dsa import SparseLatentAttention
from hpcrl.modeling.layers.mla import LatentAttention
from hpcrl.modeling.layers.mlp import GatedMLP
from hpcrl.modeling.layers.moe import Experts, SigmoidRouter, SparseMLP
from hpcrl.models.arch import DeepseekV3Arch, Glm4MoeArch, GlmMoeDsaArch, SigmoidMoeArch


def sigmoid_router(arch: SigmoidMoeArch) -> SigmoidRouter:
    """Return the router of a sparse layer."""
    return SigmoidRouter(
        arch.hidden_size,
        arch.n_routed_experts,
        top_k=arch.num_experts_per_tok,
        normalise=arch.norm_topk_prob,
        groups=arch.n_group,
        top_groups=arch.topk_group,
        scale=arch.routed_scaling_factor,
    )


def _mlp(arch: SigmoidMoeArch, layer: int) -> nn.Module:
    if not arch.is_sparse(layer):
        return GatedMLP(arch.hidden_size, arch.intermediate_size)
    experts = Experts(arch.hidden_size, arch.n_routed_experts, arch.moe_intermediate_size)
    shared = arch.moe_intermediate_size * arch.n_shared_experts
    return SparseMLP(layer, sigmoid_router(arch), experts, GatedMLP(arch.hidden_size, shared) if shared else None)


def deepseek_v3_block(arch: DeepseekV3Arch, layer: int) -> nn.Module:
    """Return a layer of DeepSeek-V3 or Kimi K2."""
    return Block(arch, LatentAttention(arch, layer), _mlp(arch, layer))


def glm_moe_dsa_block(arch: GlmMoeDsaArch, layer: int) -> nn.Module:
    """Return a layer of GLM-5."""
    return Block(arch, SparseLatentAttention(arch, layer), _mlp(arch, layer))


def glm4_moe_block(arch: Glm4MoeArch, layer: int) -> nn.Module:
    """Return a layer of GLM-4.5, 4.6 or 4.7."""
    return Block(arch, GroupedQueryAttention(arch, layer), _mlp(arch, layer))
