"""Models with low-rank adapters: what is adapted, how it begins, and what it computes in each mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcrl.config.lora import LoraConfig
from hpcrl.errors import UsageError
from hpcrl.modeling import adapters
from hpcrl.modeling.adapters import adapt, adapted_matrices, init_adapters, use_adapters
from hpcrl.modeling.attention.packed import PackedAttention
from hpcrl.modeling.blocks import HeldBlock
from hpcrl.modeling.context import ReplayedExperts
from hpcrl.modeling.decoder import Decoder
from hpcrl.modeling.hf import adapter_parameters, model_tensors
from hpcrl.modeling.spec import build_model
from hpcrl.models.arch import Glm4MoeArch, Qwen3Arch

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
#: a dense layer, then one with routed experts and a shared one
MIXED = Glm4MoeArch(
    **SIZES,
    moe_intermediate_size=8,
    n_routed_experts=3,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
PARTS = {
    "attention": {f"layers.{layer}.self_attn.{own}_proj.weight" for layer in range(2) for own in "qkvo"},
    "mlp": {f"layers.0.mlp.{own}_proj.weight" for own in ("gate", "up", "down")},
    "shared_experts": {f"layers.1.mlp.shared_experts.{own}_proj.weight" for own in ("gate", "up", "down")},
    "experts": {f"layers.1.mlp.experts.{own}_proj" for own in ("gate_up", "down")},
}


def model_of(arch: Any = MIXED, **lora: Any) -> Decoder:
    model = build_model(arch, device="cpu")
    model.init_weights(torch.Generator().manual_seed(0), std=0.2)
    adapt(model, LoraConfig.model_validate({"rank": 2, "alpha": 6.0, **lora}))
    return model


def logits(model: Decoder) -> Tensor:
    tokens = torch.arange(12) % model.arch.vocab_size
    found: Tensor = model(tokens, PackedAttention(torch.tensor([0, 7, 12])).context())
    return found


@pytest.mark.parametrize("targets", [None, ["attention"], ["mlp"], ["shared_experts"], ["experts"], ["mlp", "experts"]])
def test_the_parts_that_are_named_are_adapted_and_nothing_else_is_trained(targets: list[str] | None) -> None:
    model = model_of(targets=targets)
    found = list(adapted_matrices(model))
    assert {each.base for each in found} == set().union(*(PARTS[name] for name in targets or PARTS))
    assert {each.scale for each in found} == {3.0}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {own for each in found for own in (each.a, each.b)} == set(adapter_parameters(model))
    assert not any("lora" in name for name in model_tensors(model))


def test_a_part_that_a_model_has_not_is_refused() -> None:
    with pytest.raises(UsageError, match=r"trainer\.lora\.targets: .*experts.*\n    hint: name targets that it has"):
        model_of(Qwen3Arch(**SIZES), targets=["experts"])


def test_what_experts_have_in_common_is_one_parameter_of_the_layer() -> None:
    model = model_of(targets=["experts"], experts="shared_outer")
    shapes = {name: tuple(parameter.shape) for name, parameter in adapter_parameters(model).items()}
    assert shapes == {
        "layers.1.mlp.outer.gate_up_proj.lora_A": (2, 16),
        "layers.1.mlp.experts.adapters.gate_up_proj.lora_B": (3, 16, 2),
        "layers.1.mlp.experts.adapters.down_proj.lora_A": (3, 2, 8),
        "layers.1.mlp.outer.down_proj.lora_B": (16, 2),
    }
    assert {name for each in adapted_matrices(model) for name in (each.a, each.b)} == set(shapes)


# -- the beginning


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
def test_adapters_begin_with_noise_that_changes_nothing(experts: str) -> None:
    model = model_of(experts=experts)
    plain = build_model(MIXED, device="cpu")
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora" not in name})
    for parameter in adapter_parameters(model).values():
        parameter.detach().fill_(torch.nan)
    init_adapters(model, 5)
    parameters, drawn = dict(model.named_parameters()), list[Tensor]()
    for adapted in adapted_matrices(model):
        assert not parameters[adapted.b].any()
        a = parameters[adapted.a].detach()
        bound = a.shape[-1] ** -0.5
        assert 0.5 * bound < float(a.abs().max()) <= bound
        assert float(a.min()) < 0 < float(a.max())
        drawn += a.unbind(0) if a.dim() == 3 else [a]
    # no two are alike, of experts neither
    assert not any(x.shape == y.shape and torch.equal(x, y) for i, x in enumerate(drawn) for y in drawn[:i])
    assert torch.equal(logits(model), logits(plain))


def test_the_noise_follows_from_names_and_the_seed_alone() -> None:
    """Not from what else is adapted: it is the same on every mesh."""
    found = []
    for seed, targets in ((5, None), (5, ["experts"]), (6, ["experts"])):
        model = model_of(targets=targets)
        torch.manual_seed(seed + len(found))
        init_adapters(model, seed)
        found.append(dict(model.named_parameters())["layers.1.mlp.experts.adapters.down_proj.lora_A"].detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_a_rank_draws_the_part_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts, or some columns of a matrix, as the whole has them."""
    model = model_of()
    init_adapters(model, 5)
    whole = {name: parameter.detach().clone() for name, parameter in adapter_parameters(model).items()}

    def block(tensor: Tensor) -> HeldBlock:
        low, high = [0] * tensor.dim(), list(tensor.shape)
        if tensor.dim() == 3:
            low[0] = 1
        else:
            low[1], high[1] = 3, 5
        return HeldBlock(tuple(low), tuple(high))

    def part(tensor: Tensor) -> Tensor:
        return tensor[tuple(slice(*sides) for sides in zip(*block(tensor), strict=True))]

    monkeypatch.setattr(adapters, "local_block", block)
    monkeypatch.setattr(adapters, "local_part", part)
    for parameter in adapter_parameters(model).values():
        parameter.detach().fill_(7.0)
    init_adapters(model, 5)
    found = adapter_parameters(model)
    for adapted in adapted_matrices(model):
        expected = torch.full_like(whole[adapted.a], 7.0)
        part(expected).copy_(part(whole[adapted.a]))
        assert torch.equal(found[adapted.a], expected), adapted.a


# -- modes


def disturbed(experts: str = "per_expert") -> Decoder:
    model = model_of(experts=experts)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(model).values():
        nn.init.normal_(parameter.detach(), std=0.3, generator=generator)
    return model


@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
def test_adapters_are_products_in_addition_to_the_weights(experts: str) -> None:
    """As a model whose weights have them added, of which nothing is an adapter."""
    model = disturbed(experts)
    parameters = dict(model.named_parameters())
    merged = {name: tensor.clone() for name, tensor in model.state_dict().items() if "lora" not in name}
    for adapted in adapted_matrices(model):
        a, b = parameters[adapted.a].detach(), parameters[adapted.b].detach()
        merged[adapted.base] = merged[adapted.base] + 3.0 * (b @ a)
    plain = build_model(MIXED, device="cpu")
    plain.load_state_dict(merged)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    with use_adapters(model, "merged"):
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


def test_adapters_can_be_left_out_for_a_while() -> None:
    model = disturbed()
    plain = build_model(MIXED, device="cpu")
    plain.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora" not in name})
    before = logits(model)

    def fails() -> None:
        with use_adapters(model, "off"):
            assert torch.equal(logits(model), logits(plain))
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert torch.equal(logits(model), before)
    assert not torch.allclose(before, logits(plain))


# -- replayed experts


def test_experts_of_engines_take_the_place_of_those_that_are_known() -> None:
    experts = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[9, 9], [9, 9]]], dtype=torch.uint8)
    replay = ReplayedExperts(experts, torch.tensor([True, True, False]), {1: 0, 3: 1})
    own = torch.tensor([[10, 11], [12, 13], [14, 15]])
    assert replay.of(3).tolist() == [[2, 3], [6, 7], [9, 9]]
    found = replay.instead_of(own, 1)
    assert (found.tolist(), found.dtype) == ([[0, 1], [4, 5], [14, 15]], torch.int64)
