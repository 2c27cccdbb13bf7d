"""Qwen3-Next and Qwen3.5: the gated delta rule, gated attention, and experts with a shared one behind a gate."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.hf import RenamedTensors
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.delta_net import GatedDeltaMixer
from hpcrl.modeling.layers.mlp import GatedMLP
from hpcrl.modeling.layers.moe import Experts, SoftmaxRouter, SparseMLP
from hpcrl.models.arch import GatedDeltaArch, Qwen3NextArch, Qwen35Arch, Qwen35MoeArch


class SharedExpertNames(RenamedTensors):
    """The one shared expert is ``shared_expert``."""

    NAMES: ClassVar = {".mlp.shared_experts.": ".mlp.shared_expert."}


def qwen3_next_block(arch: Qwen3NextArch, layer: int) -> nn.Module:
    """Return a layer of Qwen3-Next; the config says which ones are dense."""
    if not arch.is_sparse(layer):
        return _block(arch, layer, GatedMLP(arch.hidden_size, arch.intermediate_size))
    return _block(arch, layer, _sparse(arch, layer))


def qwen3_5_block(arch: Qwen35Arch, layer: int) -> nn.Module:
    """Return a layer of dense Qwen3.5."""
    return _block(arch, layer, GatedMLP(arch.hidden_size, arch.intermediate_size))


def qwen3_5_moe_block(arch: Qwen35MoeArch, layer: int) -> nn.Module:
    """Return a layer of Qwen3.5 with experts."""
    return _block(arch, layer, _sparse(arch, layer))


def _block(arch: GatedDeltaArch, layer: int, mlp: nn.Module) -> nn.Module:
    if arch.layer_types[layer] == "full_attention":
        return Block(arch, GroupedQueryAttention(arch, layer), mlp)
    return Block(arch, GatedDeltaMixer(arch, layer), mlp, name="linear_attn")


def _sparse(arch: Qwen3NextArch | Qwen35MoeArch, layer: int) -> SparseMLP:
    gate = SoftmaxRouter(
        arch.hidden_size, arch.num_experts, top_k=arch.num_experts_per_tok, normalise=arch.normalises_weights
    )
    experts = Experts(arch.hidden_size, arch.num_experts, arch.moe_intermediate_size)
    shared = GatedMLP(arch.hidden_size, arch.shared_expert_intermediate_size)
    return SparseMLP(layer, gate, experts, shared, shared_gate=True)
