"""Names of adapters, as PEFT and vLLM look for them."""

from __future__ import annotations

import pytest

from hpcrl.config.lora import LoraConfig
from hpcrl.modeling.adapters import AdapterNames, adapt
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Qwen3MoeArch

ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
EXPERTS = [f"mlp.experts.{e}.{part}_proj" for e in range(8) for part in ("gate", "up", "down")]


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
@pytest.mark.parametrize(
    ("targets", "parts"),
    [(["attention"], ATTENTION), (["experts"], EXPERTS), (None, [*ATTENTION, *EXPERTS])],
    ids=["attention", "experts", "all"],
)
def test_every_adapted_matrix_has_its_published_name_once(
    targets: list[str] | None, parts: list[str], experts: str
) -> None:
    arch = Qwen3MoeArch(
        vocab_size=103,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    model = build_model(arch, device="cpu")
    adapt(model, LoraConfig.model_validate({"rank": 2, "targets": targets, "experts": experts}))
    names = AdapterNames(model)
    modules = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    assert sorted(names.modules) == sorted(modules)
    published = [name for own, tensor in names.tensors(model).items() for name, _ in names.to_hf(own, tensor)]
    assert set(published) == {
        f"base_model.model.{module}.lora_{letter}.weight" for module in modules for letter in "AB"
    }
