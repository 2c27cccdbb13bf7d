"""The digest of the weights that adapters were trained on, against whole numbers of Python.

Checkpoints keep it: a later program that finds another number would refuse adapters that fit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from trainer_testing import run_ranks

from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step import base_digest as digests
from hpcrl.trainer.step.base_digest import base_digest, tensor_digest

MASK = (1 << 64) - 1
#: 2 ** 64 divided by the golden ratio, rounded to an odd number
GOLDEN = 0x9E3779B97F4A7C15


def signed(number: int) -> int:
    """Read 64 bits as a signed number."""
    number &= MASK
    return number - (1 << 64) if number >> 63 else number


def by_hand(name: str, tensor: Tensor) -> int:
    """Add up bits of all elements in the order of their places."""
    words = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    total = 0
    for place, bits in enumerate(words.flatten().tolist()):
        mixed = signed(place * GOLDEN)
        total += bits * ((mixed ^ (mixed >> 29)) | 1)
    return signed(total * (xxhash.xxh3_64_intdigest(name) | 1))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def test_the_factor_is_that_of_the_golden_ratio() -> None:
    assert signed(GOLDEN) == -7046029254386353131
    assert pytest.approx((1 << 64) / ((1 + math.sqrt(5)) / 2), rel=1e-15) == GOLDEN


@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (4, 1), (2, 3, 5), (2, 2, 2, 3), (0, 4), (4, 0)], ids=str)
def test_a_digest_is_a_sum_over_places(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype, piece: int
) -> None:
    monkeypatch.setattr(digests, "_PIECE", piece)
    tensor = drawn(shape, dtype)
    for name in ("layers.0.norm.weight", "embed_tokens.weight", "a", "b"):
        found = tensor_digest(name, tensor)
        assert (found.dtype, tuple(found.shape), found.device.type) == (torch.int64, (1,), "cpu")
        assert int(found) == by_hand(name, tensor)


def test_a_view_has_the_digest_of_its_numbers() -> None:
    tensor = drawn((4, 6), torch.float32).T[1:4]
    assert int(tensor_digest("w", tensor)) == by_hand("w", tensor)


class Model(nn.Module):
    """Parameters that are cut between ranks along different dimensions, and a buffer that every rank has whole."""

    def __init__(self, cut: Any = lambda tensor, dim: tensor) -> None:
        super().__init__()
        self.wide = nn.Parameter(cut(drawn((3, 8), torch.float32), 0))
        self.deep = nn.Parameter(cut(drawn((5, 2, 6), torch.float32), 2))
        self.register_buffer("offsets", drawn((7,), torch.float32))


def whole_digest() -> int:
    model = Model()
    named = {"wide": model.wide.detach(), "deep": model.deep.detach(), "offsets": drawn((7,), torch.float32)}
    return signed(sum(by_hand(name, tensor) for name, tensor in named.items()))


def ranks_digests(rank: int) -> tuple[int, int]:
    """The digest of a model that both ranks have a part of, and that of a whole one in a group of this rank alone."""
    with distributed(timeout_s=60):
        mesh = init_device_mesh("cpu", (2,))
        shared = base_digest(Model(lambda tensor, dim: distribute_tensor(tensor, mesh, [Shard(dim)])), mesh.get_group())
        alone = [dist.new_group([each]) for each in range(2)][rank]
        return int(shared), int(base_digest(Model(), alone))


def test_the_digest_of_a_model_does_not_depend_on_how_it_is_cut() -> None:
    wanted = whole_digest()
    assert run_ranks(2, ranks_digests) == [(wanted, wanted)] * 2
