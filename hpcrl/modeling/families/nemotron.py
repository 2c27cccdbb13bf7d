"""Nemotron 3: Mamba-2, attention, dense blocks and experts, one a layer."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import DecoderLayer
from hpcrl.modeling.families.deepseek import sigmoid_router
from hpcrl.modeling.hf import RenamedTensors
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.mamba import Mamba2
from hpcrl.modeling.layers.mlp import SquaredMLP
from hpcrl.modeling.layers.moe import SparseMLP, SquaredExperts
from hpcrl.modeling.layers.norm import norm_of
from hpcrl.modeling.rope import RotaryTables
from hpcrl.models.arch import NemotronHArch


class BackboneNames(RenamedTensors):
    """The model is ``backbone``."""

    NAMES: ClassVar = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.": "backbone.",
    }


class _Block(DecoderLayer):
    """A layer of one module, behind a norm and with a residual."""

    def __init__(self, arch: NemotronHArch, mixer: nn.Module) -> None:
        super().__init__()
        self.norm = norm_of(arch, arch.hidden_size)
        self.mixer = mixer

    def compute(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """See `DecoderLayer`."""
        normed = self.norm(x)
        if isinstance(self.mixer, Mamba2 | GroupedQueryAttention):
            mixed: Tensor = self.mixer(normed, rotary, context)
        else:
            mixed = self.mixer(normed, context) if isinstance(self.mixer, SparseMLP) else self.mixer(normed)
        return x + mixed


def nemotron_h_block(arch: NemotronHArch, layer: int) -> nn.Module:
    """Return a layer of Nemotron 3."""
    match arch.layers_block_type[layer]:
        case "mamba":
            return _Block(arch, Mamba2(arch, layer))
        case "attention":
            return _Block(arch, GroupedQueryAttention(arch, layer))
        case "mlp":
            return _Block(arch, SquaredMLP(arch.hidden_size, arch.intermediate_size))
    width = arch.moe_latent_size or arch.hidden_size
    experts = SquaredExperts(width, arch.n_routed_experts, arch.moe_intermediate_size)
    shared = arch.moe_shared_expert_intermediate_size * arch.n_shared_experts
    shared_experts = SquaredMLP(arch.hidden_size, shared) if shared else None
    latent = arch.moe_latent_size
    return _Block(arch, SparseMLP(layer, sigmoid_router(arch), experts, shared_experts, latent_size=latent))
