"""Backends of block FP8 on a GPU, against the reference on the same numbers."""

from __future__ import annotations

import pytest
import torch

from hpcrl.errors import UsageError
from hpcrl.modeling.fp8.backends import Backend, Reference
from hpcrl.modeling.fp8.find import find_backend
from hpcrl.modeling.fp8.fused_quantiser import fused_quantiser, try_quantiser
from hpcrl.modeling.fp8.products import grouped_product, linear_product

pytestmark = pytest.mark.gpu
#: results are bfloat16, and weights' gradients are rounded to it
TOLERANCE = 0.01


@pytest.fixture(params=["deep_gemm", "torch"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        return find_backend(request.param, torch.device("cuda"))
    except UsageError as error:
        pytest.skip(str(error))


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
    pytest.importorskip("triton")
    try_quantiser(fused_quantiser(), torch.device("cuda"))
