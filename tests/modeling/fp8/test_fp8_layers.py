"""Which layers of a model multiply in FP8, what of the model stays as it was, and which wishes are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hpcrl.errors import UsageError
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.fp8.backends import Reference
from hpcrl.modeling.fp8.linear import Fp8Linear
from hpcrl.modeling.fp8_layers import Fp8Grouped, use_fp8
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import GptOssArch, NemotronHArch, Qwen3Arch, Qwen3MoeArch
from hpcrl.weights.format.quantise import QuantisedModules

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
SPARSE = Qwen3MoeArch(**SIZES, moe_intermediate_size=8, num_experts=3, num_experts_per_tok=2)
#: what engines have in FP8 of a layer of it
ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}


def model_of(arch: Any) -> Decoder:
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.2)
    return model


def in_fp8(model: Decoder) -> set[str]:
    linears = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    grouped = {n for n, m in model.named_modules() if isinstance(getattr(m, "product", None), Fp8Grouped)}
    return linears | grouped


def of_layers(names: set[str], layers: range = range(2)) -> set[str]:
    return {f"layers.{layer}.{name}" for layer in layers for name in names}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (QuantisedModules(), of_layers({*ATTENTION, "mlp.experts"})),
        (QuantisedModules(experts=False), of_layers(ATTENTION)),
        (QuantisedModules(linears=False), of_layers({"mlp.experts"})),
        (QuantisedModules(keep=("*.o_proj",)), of_layers({*ATTENTION, "mlp.experts"} - {"self_attn.o_proj"})),
        (QuantisedModules(keep=("model.layers.0.*",)), of_layers({*ATTENTION, "mlp.experts"}, range(1, 2))),
        (
            QuantisedModules(keep=("*.experts.*", "*.layers.1.self_attn.[qk]_proj")),
            of_layers(ATTENTION, range(1)) | {"layers.1.self_attn.v_proj", "layers.1.self_attn.o_proj"},
        ),
    ],
)
def test_the_layers_that_engines_have_in_fp8_are(wanted: QuantisedModules, expected: set[str]) -> None:
    """Neither the head nor the router is among them."""
    model = model_of(SPARSE)
    use_fp8(model, wanted, Reference())
    assert in_fp8(model) == expected


def test_parameters_are_those_that_there_were() -> None:
    model = model_of(SPARSE)
    before = dict(model.named_parameters())
    use_fp8(model, QuantisedModules(), Reference())
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.arange(12) % model.arch.vocab_size
    found: torch.Tensor = model(tokens, PackedAttention(torch.tensor([0, 7, 12])).context())
    return found


@pytest.mark.parametrize("part", ["linears", "experts"])
def test_each_part_changes_what_a_model_computes_by_a_rounding(part: str) -> None:
    exact, rounded = model_of(SPARSE), model_of(SPARSE)
    use_fp8(rounded, QuantisedModules(linears=part == "linears", experts=part == "experts"), Reference())
    with torch.no_grad():
        wanted, found = logits(exact), logits(rounded)
    far = float((found - wanted).norm() / wanted.norm())
    assert 1e-3 < far < 0.2


def test_a_bias_is_added_as_it_is() -> None:
    linear = nn.Linear(16, 8)
    own, x = Fp8Linear.of(linear, Reference()), torch.zeros(3, 16)
    assert (own.weight, own.bias) == (linear.weight, linear.bias)
    assert (own.in_features, own.out_features) == (16, 8)
    assert torch.equal(own(x), linear.bias.detach().expand(3, -1))
    assert not Fp8Linear.of(nn.Linear(16, 8, bias=False), Reference())(x).any()


def test_experts_without_a_gate_are_in_fp8_too() -> None:
    model = model_of(
        NemotronHArch(
            **SIZES,
            intermediate_size=16,
            moe_intermediate_size=8,
            layers_block_type=("attention", "moe"),
            n_routed_experts=3,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_latent_size=8,
            moe_shared_expert_intermediate_size=8,
            mamba_num_heads=2,
            mamba_head_dim=4,
            n_groups=1,
            ssm_state_size=4,
            chunk_size=4,
        )
    )
    use_fp8(model, QuantisedModules(linears=False), Reference())
    assert [name.endswith(".experts") for name in in_fp8(model)] == [True]


FUSED = GptOssArch(**SIZES, intermediate_size=8, num_local_experts=3, num_experts_per_tok=2, sliding_window=5)


@pytest.mark.parametrize(
    ("arch", "wanted", "message"),
    [
        (SPARSE, {"keep": ("lm_head",)}, r"keep: 'lm_head' keeps nothing that would be in FP8\n    hint: give publ"),
        (SPARSE, {"keep": ("*.o_proj", "*.nothing")}, r"keep: '\*\.nothing' keeps nothing"),
        # the second says what the first has said
        (SPARSE, {"keep": ("*.o_proj", "*.layers.0.self_attn.o_proj")}, r"'\*\.layers\.0\.self_attn\.o_proj' keeps"),
        (SPARSE, {"experts": False, "keep": ("*.experts.*",)}, r"'\*\.experts\.\*' keeps nothing"),
        (
            SPARSE,
            {"keep": ("*.layers.1.mlp.experts.2.up_proj",)},
            r"keep has model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight, but not all of the 9 matrices that are "
            r"multiplied with it \(layers\.1\.mlp\.experts\)\n    hint: give a pattern of all",
        ),
        (SPARSE, {"linears": False, "experts": False}, r"nothing is left .*\n    hint: leave trainer\.precision\.fp8"),
        (
            FUSED,
            {},
            r"fp8\.experts: .* published as one tensor.*\n    hint: set trainer\.precision\.fp8\.experts: fals",
        ),
    ],
)
def test_what_has_no_effect_is_refused(arch: Any, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        use_fp8(model_of(arch), QuantisedModules(**wanted), Reference())


@pytest.mark.parametrize(
    ("arch", "wanted"),
    [
        (FUSED, {"experts": False}),
        (SPARSE, {"keep": ("*.experts.*",)}),
        (Qwen3Arch(**SIZES, intermediate_size=16), {}),
    ],
    ids=["fused experts that are not wanted", "experts that are kept", "no experts"],
)
def test_a_model_without_experts_in_fp8_has_its_linears(arch: Any, wanted: dict[str, Any]) -> None:
    model = model_of(arch)
    use_fp8(model, QuantisedModules(**wanted), Reference())
    found = in_fp8(model)
    assert of_layers(ATTENTION) <= found
    assert not any(name.endswith("experts") for name in found)
