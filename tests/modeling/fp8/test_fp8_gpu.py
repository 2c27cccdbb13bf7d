"""Backends of block FP8 on a GPU, against the reference on the same numbers."""

from __future__ import annotations

import pytest
import torch

from hpcrl.modeling.fp8.backends import Backend, Reference
from hpcrl.modeling.fp8.find_fp8 import find_backend
from hpcrl.modeling.fp8.fused_quantiser import fused_quantiser, try_quantiser
from hpcrl.modeling.fp8.products import grouped_product, linear_product
from hpcrl.modeling.fp8.quantiser import PLAIN, block_amax, quantise, scales_of

pytestmark = pytest.mark.gpu
#: results are bfloat16, and weights' gradients are rounded to it
TOLERANCE = 0.01


@pytest.fixture(params=["deep_gemm", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    # what is refused fails the test: a library that is missing, or differs from the reference, is not a reason to skip
    return find_backend(request.param, torch.device("cuda"))


def results(backend: Backend, rows: int, counts: torch.Tensor | None) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows)
    shapes = [(rows, 576), (1152, 576) if counts is None else (len(counts), 1152, 576), (rows, 1152)]
    x, weight, grad = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes)
    x.requires_grad_(), weight.requires_grad_()
    y = linear_product(x, weight, backend) if counts is None else grouped_product(x, weight, counts, backend, parts=2)
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def check(backend: Backend, rows: int, counts: torch.Tensor | None) -> None:
    found, wanted = results(backend, rows, counts), results(Reference(), rows, counts)
    for own, other in zip(found, wanted, strict=True):
        assert float((own.float() - other.float()).norm() / other.float().norm()) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 127, 1024])
def test_linear_products(backend: Backend, rows: int) -> None:
    check(backend, rows, None)


@pytest.mark.parametrize("counts", [[3, 0, 200, 1, 0, 128], [0, 0, 1]])
def test_grouped_products(backend: Backend, counts: list[int]) -> None:
    check(backend, sum(counts), torch.tensor(counts, device="cuda"))


def test_the_quantiser_of_one_pass_gives_the_bits_of_torch() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try_quantiser(fused_quantiser(), torch.device("cuda"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("shape", [(200, 300), (3, 130, 260)])
def test_a_device_quantises_as_a_processor_does(device: str, shape: tuple[int, ...]) -> None:
    """At a hand-off and in products: every bit of weights, and of rows and what is turned over."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    there = x.to(device)
    for make in PLAIN:
        for own, other in ((there, x), (there.mT, x.mT)):
            found, wanted = make(own), make(other)
            assert torch.equal(found.scales.cpu(), wanted.scales)
            assert torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
    part = x.view(-1, x.shape[-1])[40:130]
    # what a rank has, over the scales that ranks agree on
    published = [
        quantise(own, (40, 0), scales_of(block_amax(own, (40, 0)))).cpu().view(torch.uint8)
        for own in (part.to(device), part)
    ]
    assert torch.equal(*published)
    whole = PLAIN.blocks(x.view(-1, x.shape[-1])[:128])
    again = quantise(x.view(-1, x.shape[-1])[:128].to(device), (0, 0), whole.scales.to(device))
    assert torch.equal(again.cpu().view(torch.uint8), whole.values[:128, : x.shape[-1]].view(torch.uint8))
