"""Kernels of sparse attention on a GPU, against the reference on the same numbers."""

from __future__ import annotations

import pytest
import torch

from hpcrl.modeling.kernels.kernel import Attended
from hpcrl.modeling.sparse_kernels.find import find_sparse_kernel
from hpcrl.modeling.sparse_kernels.kernel import Chosen, SparseKernel, SparseShape
from hpcrl.modeling.sparse_kernels.reference import ReferenceKernel

pytestmark = pytest.mark.gpu
GLM5 = SparseShape(64, 576, 512, 2048, 32, 128, torch.bfloat16)


@pytest.fixture(params=["triton", "flash_mla", "flash_mla_cudnn"])
def kernel(request: pytest.FixtureRequest) -> SparseKernel:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    # it tries the kernel on small numbers; what is refused fails the test, also a library that is missing
    return find_sparse_kernel(request.param, torch.device("cuda"), GLM5)


def test_a_layer_of_glm5(kernel: SparseKernel) -> None:
    """4,096 queries, each of 2,048 earlier tokens at most."""
    draw = torch.Generator("cuda").manual_seed(0)
    tokens = 4096

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw, device="cuda", dtype=torch.bfloat16)

    q, rows, grad = normal(tokens, GLM5.heads, GLM5.dim), normal(tokens, GLM5.dim), normal(tokens, GLM5.heads, 512)
    chosen = torch.rand(tokens, tokens, generator=draw, device="cuda")
    chosen = chosen.tril().topk(GLM5.width).indices.int()
    chosen = chosen.masked_fill(chosen > torch.arange(tokens, device="cuda")[:, None], -1)
    inputs = Chosen(q, rows, chosen, 512, 256**-0.5)

    def results(kind: SparseKernel) -> list[torch.Tensor]:
        attended = Attended(*kind.forward(inputs))
        return [*attended, *kind.backward(grad, inputs, attended)]

    found = results(kernel)
    for own, other in zip(found, results(ReferenceKernel()), strict=True):
        assert float((own.float() - other.float()).norm() / other.float().norm()) < 0.02
    if kernel.deterministic:
        assert all(torch.equal(*both) for both in zip(found, results(kernel), strict=True))
