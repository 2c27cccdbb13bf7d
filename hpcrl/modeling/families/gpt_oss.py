"""gpt-oss, whose published experts of a layer are one tensor each, as in hpcrl's models."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.hf import RenamedTensors
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.moe import ChosenSoftmaxRouter, ClampedExperts, SparseMLP
from hpcrl.models.arch import GptOssArch


class FusedNames(RenamedTensors):
    """Routers are named ``router``, and experts share one tensor."""

    FUSED: ClassVar = True
    NAMES: ClassVar = {".mlp.gate.": ".mlp.router."}


def gpt_oss_block(arch: GptOssArch, layer: int) -> nn.Module:
    """Return a layer of gpt-oss."""
    gate = ChosenSoftmaxRouter(arch.hidden_size, arch.num_local_experts, top_k=arch.num_experts_per_tok)
    experts = ClampedExperts(
        arch.hidden_size,
        arch.num_local_experts,
        arch.intermediate_size,
        alpha=arch.swiglu_alpha,
        limit=arch.swiglu_limit,
    )
    return Block(arch, GroupedQueryAttention(arch, layer), SparseMLP(layer, gate, experts))
