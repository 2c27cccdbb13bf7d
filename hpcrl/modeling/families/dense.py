"""Layers of Qwen2, dense Qwen3, Llama and Mistral: grouped-query attention and a gated block."""

from __future__ import annotations

from torch import nn

from hpcrl.modeling.decoder import Block
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.mlp import GatedMLP
from hpcrl.models.arch import DenseArch, Qwen3Arch, Qwen3MoeArch


def dense_block(arch: DenseArch | Qwen3Arch | Qwen3MoeArch, layer: int) -> nn.Module:
    """Make a dense layer; biases, norms of queries and keys, and windows are those of ``arch``."""
    return Block(arch, GroupedQueryAttention(arch, layer), GatedMLP(arch.hidden_size, arch.intermediate_size))
