"""Block FP8: the quantiser, and products against float64 of what it has quantised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8.backends import Groups, Reference
from hpcrl.modeling.fp8.find_fp8 import find_backend, products
from hpcrl.modeling.fp8.fused_quantiser import try_quantiser
from hpcrl.modeling.fp8.products import grouped_product, linear_product, rounded
from hpcrl.modeling.fp8.quantiser import (
    PLAIN,
    Quantised,
    Quantiser,
    block_amax,
    dequantise,
    quantise,
    quantise_blocks,
    quantise_rows,
    scales_of,
)
from hpcrl.weights.format.quantise import QuantisedModules

#: several rows, none, more than a block, one
COUNTS = torch.tensor([3, 0, 200, 1, 0, 128])


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Rows of different sizes, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator).exp() * scale


def meant(quantised: Quantised, rows: int, columns: int) -> Tensor:
    """What it stands for, float64, worked out element by element."""
    values, scales = quantised.values.double(), quantised.scales.double()
    height = values.shape[-2] // scales.shape[-2]
    spread = scales.repeat_interleave(height, -2).repeat_interleave(128, -1)
    return (values * spread)[..., :rows, :columns]


def close(found: Tensor, wanted: Tensor) -> None:
    """But for float32 sums."""
    assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-5


def test_a_matrix_that_is_cut_between_ranks_becomes_the_same() -> None:
    weight = draw(200, 300).bfloat16()
    whole = quantise_blocks(weight)
    parts = [(0, 70), (70, 200)]
    amax = torch.stack([torch.zeros(2, 3)] * 2)
    for i, (begin, end) in enumerate(parts):
        own = block_amax(weight[begin:end], (begin, 0))
        amax[i, begin // 128 : begin // 128 + len(own)] = own
    scales = scales_of(amax.amax(0))
    assert torch.equal(scales, whole.scales)
    for begin, end in parts:
        own = quantise(weight[begin:end], (begin, 0), scales[begin // 128 : -(-end // 128)])
        assert torch.equal(own.float(), whole.values[begin:end, :300].float())
        near = dequantise(own, scales[begin // 128 : -(-end // 128)], (begin, 0))
        assert float((near - weight[begin:end].float()).abs().max() / weight.float().abs().max()) < 1 / 16


def test_no_scale_is_too_small_for_its_reciprocal_and_nothing_hides_what_is_not_finite() -> None:
    for made in (quantise_blocks(torch.zeros(130, 5)), quantise_rows(torch.zeros(130, 5))):
        assert bool((made.dequantised() == 0).all())
        assert bool((1 / made.scales).isfinite().all())
    broken = draw(3, 200)
    broken[0, 150], broken[1, 3] = float("nan"), float("inf")
    found = quantise_rows(broken).dequantised()[:, :200].isfinite().all(-1)
    assert found.tolist() == [False, False, True]


def test_small_gradients_keep_their_digits_where_weights_have_a_floor() -> None:
    small = draw(4, 256, scale=1e-12)
    assert float((quantise_rows(small).dequantised() - small).norm() / small.norm()) < 0.04
    assert float(quantise_blocks(small).scales.min()) == pytest.approx(1e-4 / 448)


@pytest.mark.parametrize(("tokens", "out", "inside"), [(5, 128, 256), (300, 150, 200)])
def test_linear_products_are_those_of_the_quantised_numbers(tokens: int, out: int, inside: int) -> None:
    x, weight, grad = draw(tokens, inside), draw(out, inside, seed=1, scale=0.05), draw(tokens, out, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    y = linear_product(x, weight, Reference())
    y.backward(grad)
    with torch.no_grad():
        blocks = meant(quantise_blocks(weight), out, inside)
        close(y, meant(quantise_rows(x), tokens, inside) @ blocks.T)
        assert x.grad is not None
        assert weight.grad is not None
        close(x.grad, meant(quantise_rows(grad), tokens, out) @ blocks)
        # the sum goes over tokens, so they share scales
        close(weight.grad, meant(quantise_rows(grad.T), out, tokens) @ meant(quantise_rows(x.T), inside, tokens).T)
        exact = (grad.double().T @ x.double(), grad.double() @ weight.double())
        for found, wanted in zip((weight.grad, x.grad), exact, strict=True):
            assert 0.005 < float((found - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize(("parts", "out"), [(1, 128), (2, 2 * 90)])
def test_grouped_products_are_those_of_each_expert(parts: int, out: int) -> None:
    rows, inside, experts = int(COUNTS.sum()), 200, len(COUNTS)
    x, weight = draw(rows, inside), draw(experts, out, inside, seed=1, scale=0.05)
    grad = draw(rows, out, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    y = grouped_product(x, weight, COUNTS, Reference(), parts=parts)
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    begin = 0
    for expert, count in enumerate(COUNTS.tolist()):
        own, begin = slice(begin, begin + count), begin + count
        if not count:
            assert not weight.grad[expert].any()
            continue
        with torch.no_grad():
            # each part of an expert's matrix is published, and so quantised, by itself
            matrices = weight[expert].chunk(parts)
            blocks = torch.cat([meant(quantise_blocks(matrix), out // parts, inside) for matrix in matrices])
            close(y[own], meant(quantise_rows(x[own]), count, inside) @ blocks.T)
            # a part fills whole groups of 128 numbers of the gradient
            sides = [meant(quantise_rows(part), count, out // parts) for part in grad[own].chunk(parts, 1)]
            close(x.grad[own], torch.cat(sides, 1) @ blocks)
            tokens = meant(quantise_rows(x[own].T), inside, count)
            close(weight.grad[expert], meant(quantise_rows(grad[own].T), out, count) @ tokens.T)


def test_experts_without_any_row() -> None:
    x, weight = torch.zeros(0, 200, requires_grad=True), draw(3, 90, 200).requires_grad_()
    y = grouped_product(x, weight, torch.zeros(3, dtype=torch.int64), Reference())
    y.sum().backward()
    assert y.shape == (0, 90)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_places_of_groups_begin_at_multiples_of_128() -> None:
    groups = Groups.of(COUNTS, int(COUNTS.sum()))
    assert groups.sizes.tolist() == [128, 0, 256, 128, 0, 128]
    assert groups.places.tolist() == [*range(3), *range(128, 328), 384, *range(512, 640)]
    assert groups.experts.bincount().tolist() == [128, 0, 256, 128, 0, 128]


def test_what_is_rounded_keeps_its_gradient() -> None:
    weight = draw(130, 200, scale=0.1).bfloat16().requires_grad_()
    y = rounded(weight)
    wanted = quantise_blocks(weight.detach()).dequantised()[:130, :200].bfloat16()
    assert torch.equal(y, wanted)
    y.backward(torch.full_like(y, 0.5))
    assert weight.grad is not None
    assert bool((weight.grad == 0.5).all())


def test_a_backend_that_is_not_there_is_named_with_a_way_out() -> None:
    cpu = torch.device("cpu")
    assert find_backend("auto", cpu).name == find_backend("reference", cpu).name == "reference"
    for name in ("deep_gemm", "torch"):
        with pytest.raises(UsageError, match=rf"(?s)backend: {name}: .*computes on cpu.*hint: set it to reference"):
            find_backend(name, cpu)


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("model.layers.3.self_attn.kv_a_proj_with_mqa", True),
        ("model.layers.3.self_attn.kv_b_proj", True),
        ("model.layers.3.self_attn.indexer.wq_b", True),
        # vLLM multiplies with these two in bfloat16, in one product
        ("model.layers.3.self_attn.indexer.wk", False),
        ("model.layers.3.self_attn.indexer.weights_proj", False),
        ("model.layers.3.mlp.experts.7.gate_proj", True),
        ("model.layers.3.mlp.shared_experts.gate_proj", True),
        ("model.layers.3.mlp.gate", False),
        ("model.layers.3.mlp.router", False),
        ("backbone.embeddings", False),
        ("lm_head", False),
    ],
)
def test_which_matrices_are_quantised(name: str, quantised: bool) -> None:
    assert QuantisedModules().has(f"{name}.weight", (256, 256)) is quantised
    assert not QuantisedModules().has(f"{name}.bias", (256,))
    assert not QuantisedModules(keep=(name,)).has(f"{name}.weight", (256, 256))
    assert not QuantisedModules(linears=False, experts=False).has(f"{name}.weight", (256, 256))


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (Quantiser(quantise_rows, lambda x: quantise_blocks(x * 1.01)), "quantiser of blocks gives other bits"),
        # a scale that is right, and one number that was rounded down
        (
            Quantiser(lambda x: quantise_rows(torch.where(x == x.amax(), x, x * 0.97)), quantise_blocks),
            "quantiser of rows gives other bits",
        ),
        (Quantiser(quantise_rows, lambda x: x.nothing), "quantiser fails: AttributeError"),
    ],
)
def test_a_quantiser_with_other_bits_is_found_by_its_trial(spoiled: Quantiser, message: str) -> None:
    try_quantiser(PLAIN, torch.device("cpu"))
    with pytest.raises(LookupError, match=message):
        try_quantiser(spoiled, torch.device("cpu"))


class Library(Reference):
    """What a library is in front of: one that names its version, and whose product ``wrong`` is not the reference's."""

    version = "9.8.7"
    wrong = ""
    fails = False

    def __init__(self, device):
        pass

    def _made(self, name, *inputs):
        if self.fails and name == self.wrong:
            raise RuntimeError("a scale is missing")
        a, *others = inputs
        # the scales of other rows, as a library that wants them in another layout would take them
        given = a._replace(scales=a.scales.roll(1, 0)) if name == self.wrong else a
        return getattr(Reference, name)(self, given, *others)

    def multiply(self, *inputs):
        return self._made("multiply", *inputs)

    def multiply_rows(self, *inputs):
        return self._made("multiply_rows", *inputs)

    def multiply_groups(self, *inputs):
        return self._made("multiply_groups", *inputs)

    def multiply_within_groups(self, *inputs):
        return self._made("multiply_within_groups", *inputs)


PRODUCTS = ("multiply", "multiply_rows", "multiply_groups", "multiply_within_groups")


@pytest.mark.parametrize("wrong", PRODUCTS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_backend_is_tried_before_it_is_taken(monkeypatch, wrong, fails):
    """Names of functions say nothing of what they compute, and contracts of libraries change with their versions."""
    cpu = torch.device("cpu")
    monkeypatch.setattr("hpcrl.modeling.fp8.find_fp8.DeepGemm", Library)
    assert isinstance(find_backend("deep_gemm", cpu), Library)
    monkeypatch.setattr(Library, "wrong", wrong)
    monkeypatch.setattr(Library, "fails", fails)
    said = "9.8.7 fails on cpu: RuntimeError: a scale is missing" if fails else f"9.8.7 differs.*{wrong} by"
    with pytest.raises(UsageError, match=f"deep_gemm {said}"):
        find_backend("deep_gemm", cpu)


def test_all_products_are_tried():
    assert tuple(name for name, _ in products(Reference(), torch.device("cpu"))) == PRODUCTS
