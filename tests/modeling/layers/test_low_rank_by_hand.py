"""Adapters in their three modes, against products that are written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcrl.modeling.low_rank import AdaptedLinear, GroupedAdapter

RANK, SCALE = 3, 0.5


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["apart", "merged", "off"])
def test_a_linear_layer(mode: str) -> None:
    linear = nn.Linear(5, 7)
    with torch.no_grad():
        linear.weight.copy_(random(7, 5))
        assert linear.bias is not None
        linear.bias.copy_(random(7))
    adapted = AdaptedLinear.of(linear, RANK, SCALE)
    adapted.lora_A.data, adapted.lora_B.data = random(RANK, 5), random(7, RANK)
    adapted.mode = mode  # type: ignore[assignment]
    x, added = random(4, 5), SCALE * adapted.lora_B @ adapted.lora_A
    matrix = linear.weight if mode == "off" else linear.weight + added
    torch.testing.assert_close(adapted(x), x @ matrix.T + linear.bias)
    torch.testing.assert_close(adapted.effective(), matrix)
    assert adapted(x).shape == (4, 7)
    # the start model's own numbers stay what they were
    torch.testing.assert_close(linear.weight.detach(), random(7, 5), rtol=0, atol=0)


@pytest.mark.parametrize("outer", [None, "lora_A", "lora_B"])
def test_matrices_of_experts(outer: str | None) -> None:
    weight = random(3, 6, 4)
    adapter = GroupedAdapter(weight, RANK, SCALE, outer=outer)  # type: ignore[arg-type]
    factors = {}
    for name, shape in (("lora_A", (RANK, 4)), ("lora_B", (6, RANK))):
        factor = adapter._factor(name)
        factor.data = random(*shape) if name == outer else random(3, *shape)
        factors[name] = factor.detach().expand(3, -1, -1)
    assert adapter.effective(weight) is weight
    adapter.mode = "merged"
    wanted = weight + SCALE * torch.einsum("eor,eri->eoi", factors["lora_B"], factors["lora_A"])
    torch.testing.assert_close(adapter.effective(weight), wanted)
    torch.testing.assert_close(weight, random(3, 6, 4), rtol=0, atol=0)
