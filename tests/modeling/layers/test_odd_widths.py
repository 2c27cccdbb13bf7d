"""Products of groups of rows whose widths are no multiple of 16 bytes, beside one product a group."""

import pytest
import torch

from hpcrl.modeling.low_rank import multiply_aligned, multiply_groups

COUNTS = (3, 0, 5, 1)


def one_by_one(x, weight):
    parts = x.split(COUNTS)
    return torch.cat([part @ own for part, own in zip(parts, weight, strict=True)])


def gradients(product, x, weight):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = product(x, weight)
    (y.float() * torch.arange(1.0, y.numel() + 1).view(y.shape).cos()).sum().backward()
    return y.detach(), x.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("width_in", "width_out"), [(16, 24), (14, 24), (16, 9), (13, 7), (1, 1)])
def test_products_of_any_width_are_those_of_each_group(dtype, transposed, width_in, width_out):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS), width_in, generator=generator).to(dtype)
    weight = torch.randn(len(COUNTS), width_in, width_out, generator=generator).to(dtype)
    counts = torch.tensor(COUNTS)
    ends = counts.cumsum(0).to(torch.int32)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}

    def ours(x, weight):
        if transposed:
            return multiply_groups(x, weight.transpose(1, 2).contiguous(), counts)
        return multiply_aligned(x, weight, ends)

    for found, expected in zip(gradients(ours, x, weight), gradients(one_by_one, x, weight), strict=True):
        torch.testing.assert_close(found, expected, **tolerance)
