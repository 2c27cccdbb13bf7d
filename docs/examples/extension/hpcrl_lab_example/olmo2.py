"""A family of models: OLMo 2. Here is what needs no torch; plans are made from it.

Its layers have their norms behind attention and block, and norms of queries and keys over the channels of all heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hpcrl.models.arch import GroupedQueryArch
from hpcrl.models.external import ModelFamily
from hpcrl.models.facts import ModelFacts
from hpcrl.models.families.common import common, dense, gqa, norms
from hpcrl.models.layers import Layer


@dataclass(frozen=True, kw_only=True)
class Olmo2Arch(GroupedQueryArch):
    """Sizes of OLMo 2; fields are keys of its ``config.json``."""

    MODEL_TYPES: ClassVar[tuple[str, ...]] = ("olmo2",)
    ARCHITECTURE: ClassVar[str] = "Olmo2ForCausalLM"

    intermediate_size: int

    @property
    def rotary_dim(self) -> int:
        """All channels of a head are rotated."""
        return self.head_dim

    @property
    def qk_norm(self) -> Literal["none", "head", "all"]:
        """Norms are over the channels of all heads."""
        return "all"

    @classmethod
    def check_config(cls, config: Mapping[str, Any]) -> None:
        """Refuse what the layers do not compute."""
        if config.get("attention_bias"):
            raise ValueError("attention_bias is true; this model has no biases")


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with what transformers takes for keys that are left out."""
    heads = config.get("num_attention_heads") or 1
    found = {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, **config}
    found["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    found["head_dim"] = config.get("head_dim") or config.get("hidden_size", 0) // heads
    return found


def facts(config: Mapping[str, Any], name: str) -> ModelFacts:
    """Return the tensors of each layer, from which memory and times are computed."""
    after = norms(config["hidden_size"], "post_attention_layernorm", "post_feedforward_layernorm")
    layer = Layer(mixer=gqa(config, qk_norm="all"), mlp=dense(config), extra=after)
    return ModelFacts(**common(config, name), layers=(layer,) * config["num_hidden_layers"])


FAMILY = ModelFamily(arch=Olmo2Arch, facts=facts, spec="hpcrl_lab_example.olmo2_layers:SPEC", complete=complete)
