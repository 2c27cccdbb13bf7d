"""The layers of OLMo 2. Trainer and embedded engine import this module, with torch."""

from torch import Tensor

from hpcrl.modeling.context import BatchContext
from hpcrl.modeling.decoder import DecoderLayer
from hpcrl.modeling.layers.attention import GroupedQueryAttention
from hpcrl.modeling.layers.mlp import GatedMLP
from hpcrl.modeling.layers.norm import norm_of
from hpcrl.modeling.rope import RotaryTables
from hpcrl.modeling.spec import ModelSpec
from hpcrl_lab_example.olmo2 import Olmo2Arch


class Olmo2Layer(DecoderLayer):
    """Attention and a gated block, each with a norm behind it. Names of modules are those of published tensors."""

    def __init__(self, arch: Olmo2Arch, layer: int) -> None:
        super().__init__()
        self.self_attn = GroupedQueryAttention(arch, layer)
        self.post_attention_layernorm = norm_of(arch, arch.hidden_size)
        self.mlp = GatedMLP(arch.hidden_size, arch.intermediate_size)
        self.post_feedforward_layernorm = norm_of(arch, arch.hidden_size)

    def compute(self, x: Tensor, rotary: RotaryTables, context: BatchContext) -> Tensor:
        """``[T, hidden_size]`` to the same."""
        x = x + self.post_attention_layernorm(self.self_attn(x, rotary, context))
        return x + self.post_feedforward_layernorm(self.mlp(x))


SPEC = ModelSpec(arch=Olmo2Arch, block=Olmo2Layer)
