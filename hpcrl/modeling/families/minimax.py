"""MiniMax-M2, whose published tensors have Mixtral's names."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.hf import RenamedTensors
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.moe import Experts, SigmoidRouter, SparseMLP
from hpcrl.models.arch import MinimaxM2Arch


class MixtralNames(RenamedTensors):
    """Sparse blocks are ``block_sparse_moe``; an expert has ``w1`` (gate), ``w3`` (up) and ``w2`` (down)."""

    NAMES: ClassVar = {
        ".mlp.gate.e_score_correction_bias": ".block_sparse_moe.e_score_correction_bias",
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.weight": ".w1.weight",
        ".up_proj.weight": ".w3.weight",
        ".down_proj.weight": ".w2.weight",
    }


def minimax_m2_block(arch: MinimaxM2Arch, layer: int) -> nn.Module:
    """Return a layer of MiniMax-M2."""
    gate = SigmoidRouter(
        arch.hidden_size,
        arch.num_local_experts,
        top_k=arch.num_experts_per_tok,
        normalise=True,
        groups=1,
        top_groups=1,
        scale=1.0,
    )
    experts = Experts(arch.hidden_size, arch.num_local_experts, arch.intermediate_size)
    return Block(arch, GroupedQueryAttention(arch, layer), SparseMLP(layer, gate, experts))
